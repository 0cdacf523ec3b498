"""F in shards against F on every rank: the same steps, begun ahead or not, and state that fits both."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_unigrad import Mixed, leaves, mixed, views
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unigrad_fast.kernels import ops
from unigrad_fast.objectives import UniGrad, ranks
from unigrad_fast.objectives.placement import choose, seconds
from unigrad_fast.objectives.sharded_correlation import row_bounds

WIDTH, IMAGES, STEPS = 40, 5, 10
CASES = ["two views", "multi-crop", "CutMix", "uneven rows", "online source", "bf16"]


def size_and_rank() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def objective(placement: str, width: int = WIDTH, **settings) -> UniGrad:
    return UniGrad(width, placement=placement, most_images=IMAGES, **settings)


def batch(case: str, step: int, width: int = WIDTH) -> dict[str, list[torch.Tensor] | Mixed]:
    """This rank's batch."""
    _, rank = size_and_rank()
    images = IMAGES if case != "uneven rows" else (step + 2 * rank) % (IMAGES + 1)
    count, seed = 4 if case in ("multi-crop", "uneven rows") else 2, 100 * step + rank
    online = views(count, images, width, seed, torch.float32)
    target = views(2, images, width, seed + 5000, torch.float32)
    return {"online": online, "target": target, "mix": mixed(images, seed) if case == "CutMix" else None}


def settings_of(case: str) -> dict:
    return {
        "correlation_source": "online" if case == "online source" else "target",
        "compute_dtype": torch.bfloat16 if case == "bf16" else None,
    }


def take(module: UniGrad, given: dict, early: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient and flag of a step."""
    online = leaves(given["online"])
    if early:
        module.begin_update(given["target"])
    output = module(online=online, target=given["target"], mix=given["mix"])
    output.loss.backward()
    return output.loss.detach(), torch.cat([view.grad for view in online]), output.nonfinite


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def agreement(cases: list[str], width: int, steps: int) -> dict[str, float]:
    """By case the largest distance between placements; what is begun ahead is bitwise the same."""
    found = {}
    for case in cases:
        modules = {
            (placement, early): objective(placement, width, **settings_of(case))
            for placement in ("replicated", "sharded")
            for early in (False, True)
        }
        worst = 0.0
        for step in range(steps):
            given = batch(case, step, width)
            taken = {key: take(module, given, key[1]) for key, module in modules.items()}
            for placement in ("replicated", "sharded"):
                pairs = zip(taken[placement, False], taken[placement, True], strict=True)
                assert all(torch.equal(*pair) for pair in pairs), (case, placement, step)
            one, other = taken["replicated", False], taken["sharded", False]
            worst = max(worst, *(distance(b, a) for a, b in zip(one[:2], other[:2], strict=True)))
        matrices = {key: module.whole_correlation() for key, module in modules.items()}
        for placement in ("replicated", "sharded"):
            assert torch.equal(matrices[placement, False], matrices[placement, True])
            assert torch.equal(matrices[placement, True], matrices[placement, True].T)
        worst = max(worst, distance(matrices["sharded", False], matrices["replicated", False]))
        taken_in = {module.updates.item() for module in modules.values()}
        assert len(taken_in) == 1 and (taken_in == {steps} or case == "uneven rows")  # on one rank some have no rows
        ranks = {key: module.effective_rank() for key, module in modules.items()}
        assert ranks["sharded", True].item() == pytest.approx(ranks["replicated", True].item(), rel=1e-4)
        if size_and_rank()[0] > 1:
            rows = modules["sharded", False].correlation
            first, last = row_bounds(width, size_and_rank()[0])[size_and_rank()[1] :][:2]
            assert rows.shape == (last - first, width) and len(rows) < width
        found[case] = worst
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sharded_correlation_trains_as_a_replicated_one_does(workers, ranks):
    for found in workers(ranks).run(agreement, CASES, WIDTH, STEPS):
        assert list(found) == CASES
        assert {case: worst for case, worst in found.items() if not worst < (5e-3 if case == "bf16" else 1e-6)} == {}


def test_a_width_that_the_ranks_do_not_divide_is_sharded(workers):
    assert row_bounds(1000, 3) == [0, 336, 672, 1000] and row_bounds(40, 3) == [0, 13, 26, 40]
    for found in workers(3).run(agreement, ["multi-crop"], 1000, 2):
        assert found["multi-crop"] < 1e-6


def gated() -> None:
    size, rank = size_and_rank()
    for placement in ("replicated", "sharded"):
        for early in (False, True):
            module = objective(placement)
            take(module, batch("two views", 0))
            before = module.correlation.clone()
            for branch in ("online", "target"):
                given = batch("two views", 1)
                if rank == size - 1:
                    given[branch][1][2, 3] = torch.nan
                loss, gradient, flag = take(module, given, early)
                assert flag == 1 and loss.isfinite() and gradient.isfinite().all()
                assert torch.equal(module.correlation, before) == (branch == "target")
                before = module.correlation.clone()
            assert module.updates == 2


def test_a_value_that_is_not_finite_is_known_on_all_ranks_and_kept_out_of_all_shards(workers):
    workers(3).run(gated)


def evaluated() -> None:
    modules = [objective(placement) for placement in ("replicated", "sharded")]
    for module in modules:
        take(module, batch("multi-crop", 0))
        module.eval()
    before = modules[1].correlation.clone()
    given = batch("uneven rows", 1)
    if size_and_rank()[1] == 0 and given["online"][0].numel():
        given["online"][2][0, 0] = torch.inf
    one, other = (take(module, given) for module in modules)
    assert distance(other[0], one[0]) < 1e-6 and distance(other[1], one[1]) < 1e-6 and other[2] == one[2]
    assert torch.equal(modules[1].correlation, before) and modules[1].updates == 1


def test_shards_evaluate_together_and_each_rank_is_told_of_its_own_images(workers):
    workers(3).run(evaluated)


def misfit() -> str:
    _, rank = size_and_rank()
    message = ""
    for early in (False, True):
        module = objective("sharded")
        take(module, batch("two views", 0))
        before, images = module.correlation.clone(), IMAGES + rank
        given = {"online": views(2, images, WIDTH), "target": views(2, images, WIDTH, 1), "mix": None}
        given = {name: value and [view.float() for view in value] for name, value in given.items()}
        try:
            assert take(module, given, early)[2] == 1
        except ValueError as error:
            message = str(error)
        assert torch.equal(module.correlation, before)
        take(module, batch("two views", 1), early)  # all ranks go on together
        assert module.updates == 2
    return message


def test_more_images_than_agreed_on_are_refused_and_no_rank_waits_for_ever(workers):
    first, second = workers(2).run(misfit)
    assert first == "" and "this rank has 6 images, more than 5 (most_images)" in second


def resumed() -> None:
    """A state dict goes on bit for bit in its placement; all of F goes into any."""
    straight, fresh, whole, copied = (objective("sharded") for _ in range(4))
    for step in range(3):
        take(straight, batch("two views", step))
    state = copy.deepcopy(straight.state_dict())
    assert list(state) == ["average.correlation", "average.updates", "average.first_row"]
    fresh.load_state_dict(state)
    copied = copy.deepcopy(straight)
    replicated = objective("replicated")
    replicated.load_state_dict(
        {"average.correlation": straight.whole_correlation(), "average.updates": straight.updates}
    )
    whole.load_state_dict(replicated.state_dict())
    first = straight.average.first_row
    assert torch.equal(whole.correlation.triu(first), straight.correlation.triu(first))
    expected = take(straight, batch("two views", 3))
    for module in (fresh, copied):
        assert all(map(torch.equal, take(module, batch("two views", 3), early=True), expected))
        assert torch.equal(module.correlation, straight.correlation)
    for module in (whole, replicated):
        assert distance(take(module, batch("two views", 3))[1], expected[1]) < 1e-6
    if size_and_rank()[1]:
        with pytest.raises(RuntimeError, match=r"first_row is 0 in the state dict and \d+ here"):
            fresh.load_state_dict({**state, "average.first_row": torch.tensor(0)})


def test_the_state_of_shards_goes_on_bit_for_bit_and_goes_to_the_other_placement(workers):
    workers(3).run(resumed)


def bytes_sent() -> list[int]:
    sent, exchange = [], dist.all_to_all_single

    def watched_gather(out, own, **more):
        sent.append(out.nbytes)
        return real(out, own, **more)

    def watched_exchange(out, *arguments, **more):
        sent.append(out.nbytes)
        return exchange(out, *arguments, **more)

    real, module = ranks.gather_into, objective("sharded")
    take(module, batch("two views", 0))
    ranks.gather_into, dist.all_to_all_single = watched_gather, watched_exchange
    try:
        take(module, batch("two views", 1))
    finally:
        ranks.gather_into, dist.all_to_all_single = real, exchange
    return sent


def test_a_sharded_step_sends_rows_and_never_a_matrix(workers):
    rows = 2 * IMAGES + 1
    assert workers(2).run(bytes_sent) == [[2 * rows * WIDTH * 4, 2 * rows * WIDTH * 4, rows * WIDTH * 4]] * 2


def test_what_has_begun_goes_on_with_the_same_targets_and_not_otherwise():
    module, given = objective("replicated"), batch("two views", 0)
    module.begin_update(given["target"])
    with pytest.raises(RuntimeError, match="called twice"):
        module.begin_update(given["target"])
    with pytest.raises(RuntimeError, match="given other targets"):
        take(module, batch("two views", 1))
    module.begin_update(given["target"])
    with pytest.raises(RuntimeError, match=r"torch.float32, but with these online embeddings .* torch.float64"):
        module(online=views(2, IMAGES, WIDTH), target=given["target"])
    online = objective("replicated", correlation_source="online")
    online.begin_update(given["target"])  # nothing to begin with
    module.eval().begin_update(given["target"])
    take(online, batch("two views", 1))
    take(module, batch("two views", 1))
    with pytest.raises(ValueError, match="1 target views"):
        online.train() and module.train().begin_update(given["target"][:1])


def test_the_update_that_has_begun_is_not_computed_again(monkeypatch):
    module, given, seen = objective("replicated"), batch("two views", 0), []
    update = ops.update_correlation_
    monkeypatch.setattr(ops, "update_correlation_", lambda *args, **more: seen.append(1) or update(*args, **more))
    take(module, given, early=True)
    assert len(seen) == 1 and module.updates == 1


def test_auto_shards_where_it_saves_memory_or_counted_time_and_nowhere_else():
    assert choose(2048, 128, 2, 8) == choose(65536, 512, 2, 1) == choose(4, 512, 2, 8) == "replicated"
    assert choose(16384, 512, 2, 8) == "sharded" and choose(8192, 512, 8, 64) == "replicated"
    assert seconds("sharded", 16384, 512, 2, 8) < 0.9 * seconds("replicated", 16384, 512, 2, 8)
    assert seconds("sharded", 2048, 128, 2, 8) > seconds("replicated", 2048, 128, 2, 8)
    assert choose(26754, 64, 8, 2) == "replicated" and choose(26755, 64, 8, 2) == "sharded"  # 4 GiB


def test_the_page_of_counts_says_what_auto_takes_and_why():
    page = (Path(__file__).parents[2] / "benchmarks/ROOFLINE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+), (\d+), (\d+) \|.*\| ([\d.]+)(?: / ([\d.]+))? \| (\w+) \|$", page, re.MULTILINE)
    assert len(rows) == 12
    for width, size, images, whole, shard, taken in rows:
        case = (int(width), int(images), 2, int(size))
        assert taken == choose(*case)
        assert whole == f"{1e3 * seconds('replicated', *case):.2f}"
        assert shard == (f"{1e3 * seconds('sharded', *case):.2f}" if int(size) > 1 else "")


def test_placements_that_do_not_fit_are_refused(workers):
    with pytest.raises(ValueError, match="placement 'both' is unknown; use one of replicated, sharded"):
        UniGrad(8, placement="both")
    workers(2).run(refused)


def refused() -> None:
    with pytest.raises(ValueError, match="width 1 cannot be sharded over 2 ranks"):
        UniGrad(1, placement="sharded")


def of_two_dtypes() -> None:
    """Targets in fp32 beside online embeddings in float64, which decide; nothing was begun ahead."""
    for step in range(2):
        given = batch("multi-crop", step)
        given["online"] = [view.double() for view in given["online"]]
        if not step:
            modules = [objective(placement) for placement in ("replicated", "sharded")]
        one, other = (take(module, given) for module in modules)
        assert one[0].dtype == other[0].dtype == torch.float64
        assert distance(other[0], one[0]) < 1e-12 and distance(other[1], one[1]) < 1e-12
    assert modules[1].correlation.dtype == torch.float64


def test_the_online_embeddings_decide_in_which_dtype_shards_take_the_targets(workers):
    workers(2).run(of_two_dtypes)


def evaluated_first() -> None:
    module, small = UniGrad(WIDTH, placement="sharded").eval(), 2
    for images in (small, small + size_and_rank()[1]):
        given = {"online": views(2, images, WIDTH), "target": views(2, images, WIDTH, 1), "mix": None}
        assert take(module, given)[0].isfinite()
    assert module.updates == 0
    module.train()
    take(module, batch("two views", 0))
    assert module.updates == 1


def test_shards_that_are_evaluated_first_train_with_more_images_later(workers):
    workers(2).run(evaluated_first)


def interrupted() -> None:
    """The online branch fails once between `begin_update` and the call, on all ranks, and the loop goes on."""
    for placement in ("replicated", "sharded"):
        module, expected = objective(placement), objective(placement)
        for step in range(3):
            if step != 2:
                module.begin_update(batch("two views", 7 + step)["target"])
            pairs = zip(*(take(each, batch("two views", step), True) for each in (module, expected)), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        assert torch.equal(module.correlation, expected.correlation) and module.updates == 3


def interrupted_and_restored() -> None:
    for placement in ("replicated", "sharded"):
        module, expected = objective(placement), objective(placement)
        take(expected, batch("two views", 0))
        module.begin_update(batch("two views", 7)["target"])
        module.load_state_dict(copy.deepcopy(expected.state_dict()))
        assert all(
            map(torch.equal, take(module, batch("two views", 1), True), take(expected, batch("two views", 1), True))
        )
        assert torch.equal(module.correlation, expected.correlation) and module.updates == 2


@pytest.mark.parametrize("way", [interrupted, interrupted_and_restored])
def test_after_an_error_between_beginning_and_call_the_next_step_is_as_if_nothing_had_begun(workers, way):
    for size in (1, 2):
        workers(size).run(way)


def nobody_has_images() -> None:
    empty = {"online": views(2, 0, WIDTH), "target": views(2, 0, WIDTH), "mix": None}
    for early in (False, True):
        module = objective("sharded")
        for step in range(3):
            loss, gradient, flag = take(module, empty if step == 1 else batch("two views", step), early)
            assert loss.isfinite() and flag == 0 and gradient.isfinite().all()
        assert module.updates == 2


def test_a_step_in_which_no_rank_has_images_leaves_the_shards_as_they_are(workers):
    workers(2).run(nobody_has_images)


def regrouped() -> list[str]:
    """What is said of rows that were made in another process group, with a batch of a known shape."""
    groups, said = [dist.new_group(members) for members in ([0, 1], [1, 2])], []
    rank = size_and_rank()[1]
    for number, group in enumerate(groups):
        if rank not in (number, number + 1):
            continue
        module = objective("sharded", process_group=group)
        take(module, batch("two views", 0))
        module.process_group = None if number == 0 else groups[0]
        if number == 0 or rank == 1:
            for call in (lambda: take(module, batch("two views", 1)), lambda: module.begin_update([])):  # noqa: B023
                with pytest.raises(RuntimeError) as refused:
                    call()
                said.append(str(refused.value))
    return said


def test_rows_of_another_process_group_are_refused_before_anything_is_sent(workers):
    first, second, third = workers(3).run(regrouped)
    size, rank = "F is sharded over 2 ranks, but there are 3 now", "these rows of F belong to rank 0, not rank 1"
    assert [line.partition(";")[0] for line in first] == [size] * 2
    assert [line.partition(";")[0] for line in second] == [size] * 2 + [rank] * 2
    assert third == []


def largest_in_effective_rank() -> int:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
            fresh = [t.numel() for t in made if t.untyped_storage().data_ptr() not in given]
            self.numel = max(self.numel, *fresh, 0)
            return result

    module = objective("sharded")
    with Largest() as largest:
        module.effective_rank()
    return largest.numel


def test_the_effective_rank_of_shards_takes_no_memory_of_their_size(workers):
    assert max(workers(2).run(largest_in_effective_rank)) < 10
