"""The operators as torch sees them: schemas, shapes, compilation, autograd, and what they refuse."""

from __future__ import annotations

import shutil

import pytest
import torch
from formulas import error, one_step, random, unit

from unigrad_fast.kernels import (
    attach_gradient,
    correlation_product,
    dispatch,
    embedding_gradient,
    mirror_,
    unigrad_gradient,
    unit_embeddings,
    update_correlation_,
)
from unigrad_fast.kernels.dispatch import use_triton

OPERATORS = torch.ops.unigrad_fast
IMAGES, WIDTH = 5, 24
BACKENDS = ["eager", "aot_eager"] + ["inductor"] * (shutil.which("g++") is not None)


@pytest.fixture(autouse=True)
def _default_path(monkeypatch):
    monkeypatch.delenv("UNIGRAD_KERNELS", raising=False)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit embeddings of online and target branch and a correlation."""
    units, targets = unit(random(2 * IMAGES, WIDTH), dtype), unit(random(2 * IMAGES, WIDTH, seed=1), dtype)
    exact = torch.promote_types(dtype, torch.float32)
    return units, targets, (targets.to(exact).T @ targets.to(exact)) / len(targets)


def gradient_arguments(pair: bool, dtype: torch.dtype) -> tuple:
    units, targets, correlation = operands(dtype)
    image = torch.arange(2 * IMAGES)
    pairs = (image.flip(0), image, torch.rand(len(image))) if pair else (None, None, None)
    state = (flags(0, 1), flags(0), torch.tensor(3), flags(0)[0]) if pair else (None, None, None, None)
    inverse = torch.ones(len(units), dtype=correlation.dtype)
    settings = (100.0, 0.1, *pairs, *state, torch.float16 if pair else torch.float32)
    return (units, inverse, targets), correlation, settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_unit_embeddings_is_a_lawful_operator(dtype):
    views = [random(IMAGES, WIDTH, dtype=dtype), random(WIDTH, IMAGES, seed=1, dtype=torch.float32).T]
    torch.library.opcheck(OPERATORS.unit_embeddings.default, (views, dtype, flags(*[7] * 2 * IMAGES)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_are_sent_come_from_lawful_operators(dtype):
    views, rows = [random(IMAGES, WIDTH, dtype=torch.float32)] * 2, flags(*[7] * 2 * IMAGES)
    more = (flags(7, 7), flags(0)[0], IMAGES, 3)
    torch.library.opcheck(OPERATORS.unit_embeddings.default, (views, dtype, rows, *more))
    sent = unit_embeddings(views, dtype, raised=flags(7, 7), since=IMAGES, spare=3)[0][IMAGES:]
    torch.library.opcheck(OPERATORS.sum_tails_.default, (sent.repeat(2, 1), 2))


def test_mirror_is_a_lawful_operator():
    torch.library.opcheck(OPERATORS.mirror_.default, (random(WIDTH, WIDTH),))


@pytest.mark.parametrize("is_working", [False, True])
@pytest.mark.parametrize("first_row", [0, 3])
def test_update_correlation_is_a_lawful_operator(first_row, is_working):
    units, _, correlation = operands()
    correlation = correlation[first_row : first_row + 9 if first_row else None].clone()
    working = torch.zeros_like(correlation, dtype=torch.bfloat16) if is_working else None
    state = (flags(0, 0), torch.tensor(2)) if is_working else (None, None)
    arguments = (correlation, units, torch.tensor(0.9), torch.tensor(10.0), *state, first_row, working, "ieee")
    torch.library.opcheck(OPERATORS.update_correlation_.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_correlation_product_is_a_lawful_operator(dtype):
    units, _, correlation = operands(dtype)
    torch.library.opcheck(OPERATORS.correlation_product.default, (units, correlation[:7], "ieee"))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_embedding_gradient_is_a_lawful_operator(dtype, pair):
    rows, correlation, settings = gradient_arguments(pair, dtype)
    product = rows[0].to(correlation.dtype) @ correlation
    torch.library.opcheck(OPERATORS.embedding_gradient.default, (product, *rows, *settings))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_unigrad_gradient_is_a_lawful_operator(dtype, pair):
    rows, correlation, settings = gradient_arguments(pair, dtype)
    torch.library.opcheck(OPERATORS.unigrad_gradient.default, (*rows, correlation, *settings, "ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gradient_of_blocks_is_a_lawful_operator_and_that_of_the_whole_product(dtype):
    rows, correlation, settings = gradient_arguments(True, dtype)
    product = rows[0].to(correlation.dtype) @ correlation
    blocks = [product[:, :5].contiguous(), product[:, 5:]]
    torch.library.opcheck(OPERATORS.gradient_of_blocks.default, (blocks, *rows, *settings))
    found = OPERATORS.gradient_of_blocks(blocks, *rows, *settings)
    assert all(map(torch.equal, found, OPERATORS.embedding_gradient(product, *rows, *settings)))


def test_what_an_operator_writes_is_known_to_autograd_and_nothing_else_is_touched():
    embedding = random(2 * IMAGES, WIDTH, dtype=torch.float32)
    _, targets, correlation = operands()
    nonfinite, skip, updates, ticket = flags(*[7] * 2 * IMAGES), flags(0), torch.tensor(0), flags(0)[0]
    working = torch.zeros_like(correlation, dtype=torch.bfloat16)
    first, second, ratio = torch.arange(10), torch.arange(10).flip(0), torch.rand(10)
    units, inverse = unit_embeddings(embedding, nonfinite=nonfinite)
    product = correlation_product(units, correlation)
    read = [embedding, units, inverse, targets, product, skip, first, second, ratio]
    written = [correlation, working, nonfinite, updates]
    before, versions = [each.clone() for each in read], [each._version for each in [*read, *written]]

    unit_embeddings(embedding, nonfinite=nonfinite)
    update_correlation_(correlation, targets, decay=0.9, count=10, skip=skip, updates=updates, working=working)
    settings = {"balance": 100.0, "scale": 0.1, "first": first, "second": second, "ratio": ratio, "skip": skip}
    settings |= {"nonfinite": nonfinite, "updates": updates, "ticket": ticket}
    embedding_gradient(product, units, inverse, targets, **settings)
    unigrad_gradient(units, inverse, targets, correlation, **settings)

    assert all(torch.equal(*pair) for pair in zip(read, before, strict=True))
    changed = [each._version > version for each, version in zip([*read, *written], versions, strict=True)]
    assert changed == [False] * len(read) + [True] * len(written)
    assert updates == 2


def train_step(z1, z2, m1, m2, correlation, updates):
    """One step in training from four views, as the objective takes it."""
    images = z1.shape[0]
    nonfinite = torch.empty(4 * images, dtype=torch.int32)
    units, inverse = unit_embeddings([z1, z2, m1, m2], nonfinite=nonfinite)
    image = torch.arange(images)
    first = torch.cat([image + images, image])
    state = {"skip": nonfinite[2 * images :], "updates": updates}
    update_correlation_(correlation, units[2 * images :], decay=0.9, count=2 * images, **state)
    gradient, terms = unigrad_gradient(
        *(units[: 2 * images], inverse[: 2 * images], units[2 * images :], correlation),
        **{"balance": 100.0, "scale": 1 / (2 * images), "first": first, "nonfinite": nonfinite, **state},
    )
    return attach_gradient(terms, gradient, [z1, z2])


def run_steps(step, dtypes: tuple[torch.dtype, ...], autocast: bool) -> list[torch.Tensor]:
    """Losses, gradients and F of three steps."""
    correlation, updates, results = torch.full((WIDTH, WIDTH), torch.nan), torch.tensor(0), []
    for number in range(3):
        views = [random(IMAGES, WIDTH, seed=10 * number + i, dtype=dtype) for i, dtype in enumerate(dtypes)]
        online = [view.requires_grad_() for view in views[:2]]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = step(*views, correlation, updates)
        (3.0 * loss).backward()
        results += [loss.detach(), *(view.grad for view in online), correlation.clone()]
    return [*results, updates]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_step_in_one_graph_is_the_eager_one(backend, autocast):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32) if autocast else (torch.float32,) * 4
    torch.compiler.reset()
    compiled = run_steps(torch.compile(train_step, fullgraph=True, backend=backend), dtypes, autocast)
    eager = run_steps(train_step, dtypes, autocast)
    assert compiled[-1] == 3
    for ours, expected in zip(compiled, eager, strict=True):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def test_a_step_under_autocast_with_mixed_dtypes_is_computed_in_fp32():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    views = [random(IMAGES, WIDTH, seed=i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    for view in views[:2]:
        view.requires_grad_()
    correlation = torch.zeros(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        loss = train_step(*views, correlation, torch.tensor(0))
    loss.backward()
    first = torch.cat([torch.arange(IMAGES) + IMAGES, torch.arange(IMAGES)])
    online, target = (torch.cat([view.detach().double() for view in pair]) for pair in (views[:2], views[2:]))
    exact = one_step(online, target, (first, None, None), 100.0)
    assert error(correlation, exact.correlation) < 1e-6
    assert abs(loss.item() - exact.objective.item()) < 1e-5
    assert [view.grad.dtype for view in views[:2]] == list(dtypes[:2])
    assert error(views[0].grad, exact.gradient[:IMAGES]) < 1e-6
    assert error(views[1].grad, exact.gradient[IMAGES:]) < 5e-3


def known_gradient(dtypes=(torch.float32, torch.float32)) -> tuple:
    views = [torch.zeros(3, 4, dtype=dtype, requires_grad=True) for dtype in dtypes]
    gradient = random(6, 4, dtype=torch.float32)
    return attach_gradient(torch.tensor([2.5, 1.0]), gradient, views), gradient, views


def test_backward_may_be_repeated_and_adds_up():
    loss, gradient, views = known_gradient()
    before = gradient.clone()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert loss.item() == 2.5
    for view, expected in zip(views, gradient.chunk(2), strict=True):
        torch.testing.assert_close(view.grad, 3 * expected)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("factor", [0.0, -2.0, 0.5])
def test_the_gradient_is_linear_in_that_of_the_loss(factor):
    loss, gradient, views = known_gradient()
    (factor * loss).backward()
    assert torch.equal(torch.cat([view.grad for view in views]), factor * gradient)


def test_a_loss_that_is_expanded_and_summed_counts_as_often_as_it_stands_there():
    loss, gradient, views = known_gradient()
    loss.expand(4).sum().backward()
    assert torch.equal(torch.cat([view.grad for view in views]), 4 * gradient)


def test_each_embedding_gets_its_gradient_in_its_dtype():
    loss, gradient, views = known_gradient((torch.bfloat16, torch.float32))
    loss.backward()
    assert [view.grad.dtype for view in views] == [torch.bfloat16, torch.float32]
    assert torch.equal(views[0].grad, gradient[:3].bfloat16())


def test_an_embedding_that_needs_no_gradient_gets_none():
    views = [torch.zeros(3, 4, requires_grad=True), torch.zeros(3, 4)]
    attach_gradient(torch.ones(1), torch.ones(6, 4), views).backward()
    assert torch.equal(views[0].grad, torch.ones(3, 4)) and views[1].grad is None


def test_a_second_derivative_is_refused_not_wrong():
    loss, _, views = known_gradient()
    (first,) = torch.autograd.grad(torch.ones((), requires_grad=True) * loss, views[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ("", "cpu", False),
        ("", "cuda", True),
        ("torch", "cpu", False),
        ("torch", "cuda", False),
        ("triton", "cuda", True),
    ],
)
def test_the_device_or_else_the_environment_decides_who_computes(choice, device, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "capability_of", lambda device: (8, 0))
    monkeypatch.setenv("UNIGRAD_KERNELS", choice)
    assert use_triton(torch.device(device)) == expected


def test_an_unknown_choice_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", "cuda")
    with pytest.raises(ValueError, match="UNIGRAD_KERNELS=cuda is unknown; use triton or torch, or unset it"):
        unit_embeddings(torch.ones(2, 3))


def test_triton_on_the_cpu_without_its_interpreter_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("UNIGRAD_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs Triton's interpreter; set TRITON_INTERPRET=1 before"):
        unit_embeddings(torch.ones(2, 3))


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 3)], [(2, 3), (2, 4)], [(2, 3, 4)], [(5,)]])
def test_views_of_different_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match="give one or more of the same shape"):
        unit_embeddings([torch.ones(shape) for shape in shapes])


def test_no_views_at_all_are_refused():
    with pytest.raises(ValueError, match="give one or more of the same shape"):
        unit_embeddings([])


def gradient_of(**changes) -> None:
    """`unigrad_gradient` of two rows and eight channels, with other arguments."""
    arguments = {
        "unit_MC": torch.ones(2, 8),
        "inverse_norm_M": torch.ones(2),
        "target_KC": torch.ones(2, 8),
        "correlation": torch.eye(8),
        "balance": 1.0,
        "scale": 0.5,
    }
    unigrad_gradient(**{**arguments, **changes})


def update_of(correlation=None, unit=None, **changes) -> None:
    """`update_correlation_` with other arguments."""
    correlation = torch.zeros(8, 8) if correlation is None else correlation
    update_correlation_(
        correlation, torch.ones(2, 8) if unit is None else unit, **{"decay": 0.0, "count": 2, **changes}
    )


INDEX, PAIR = torch.zeros(2, dtype=torch.int64), {"second": torch.zeros(2, dtype=torch.int64), "ratio": torch.ones(2)}
REFUSED = {
    "flags of another length": (
        lambda: unit_embeddings([torch.ones(2, 3)] * 2, nonfinite=flags(0, 0)),
        r"nonfinite must be int32 \[4\] on cpu, not int32 \[2\]",
    ),
    "flags of another dtype": (
        lambda: unit_embeddings(torch.ones(2, 3), nonfinite=torch.zeros(2)),
        r"nonfinite must be int32 \[2\] on cpu, not float32 \[2\]",
    ),
    "flags with gaps": (
        lambda: unit_embeddings(torch.ones(2, 3), nonfinite=flags(0, 0, 0, 0)[::2]),
        r"nonfinite with strides \(2,\)",
    ),
    "a tail without flags": (
        lambda: unit_embeddings(torch.ones(2, 3), spare=2),
        "spare 2: give `raised`, and a spare of at least 2, the rows of the tail",
    ),
    "rows to send beyond the last": (
        lambda: unit_embeddings(torch.ones(2, 3), since=3),
        "since 3 is outside the rows; use 0 to 2",
    ),
    "some rows to mirror": (lambda: mirror_(torch.ones(2, 3)), r"\[3, 3\] on cpu, not float32 \[2, 3\]"),
    "whole numbers as embeddings": (
        lambda: unit_embeddings(torch.ones(2, 3).int()),
        r"embeddings\[0\] must be .*, not int32",
    ),
    "whole numbers as units": (
        lambda: unit_embeddings(torch.ones(2, 3), dtype=torch.int32),
        "unit embeddings cannot have dtype torch.int32",
    ),
    "views on two devices": (
        lambda: unit_embeddings([torch.ones(2, 3), torch.ones(2, 3, device="meta")]),
        r"embeddings\[1\] must be .* on cpu, not float32 \[2, 3\] on meta",
    ),
    "units of another width": (
        lambda: update_of(unit=torch.ones(2, 9)),
        r"unit_MC must be .*\[any, 8\].*not float32 \[2, 9\]",
    ),
    "rows beyond the last": (
        lambda: update_of(torch.zeros(3, 8), first_row=6),
        "3 rows of a correlation with 8 rows cannot start at row 6",
    ),
    "rows before the first": (lambda: update_of(torch.zeros(3, 8), first_row=-1), "cannot start at row -1"),
    "a vector as F": (lambda: update_of(torch.zeros(8)), r"the correlation must be .*\[any, any\].*not float32 \[8\]"),
    "half-precision F": (
        lambda: update_of(torch.zeros(8, 8).half(), torch.ones(2, 8).half()),
        "the correlation must be float32 or float64 .*not float16",
    ),
    "float64 units for an fp32 F": (
        lambda: update_of(unit=torch.ones(2, 8).double()),
        "in torch.float32 cannot be updated with units in torch.float64",
    ),
    "no rows to count": (lambda: update_of(count=0), "count 0 is too small; use 1 or more"),
    "a decay that is not a number": (lambda: update_of(decay=float("nan")), "decay nan is too small; use 0 or more"),
    "an unknown precision": (
        lambda: update_of(input_precision="bf16"),
        "input_precision 'bf16' is unknown; use 'ieee'",
    ),
    "a floating skip": (lambda: update_of(skip=torch.zeros(2)), r"skip must be int32 \[2\]"),
    "updates in another dtype": (lambda: update_of(updates=torch.zeros(())), r"updates must be int64 \[\]"),
    "a working copy in fp32": (
        lambda: update_of(working=torch.zeros(8, 8)),
        r"the working copy must be bfloat16 or float16 \[8, 8\] on cpu, not float32 \[8, 8\]",
    ),
    "a working copy of another shape": (
        lambda: update_of(working=torch.zeros(8, 4).half()),
        r"the working copy must be bfloat16 or float16 \[8, 8\] on cpu, not float16 \[8, 4\]",
    ),
    "F with gaps": (
        lambda: update_of(torch.zeros(8, 9)[:, :8]),
        r"a correlation with strides \(9, 1\) is not contiguous; give a contiguous tensor",
    ),
    "a product of other widths": (
        lambda: correlation_product(torch.ones(2, 8), torch.ones(9, 9)),
        r"the correlation must be .*\[any, 8\] on cpu, not float32 \[9, 9\]",
    ),
    "a product with whole numbers": (lambda: correlation_product(torch.ones(2, 8), torch.eye(8).long()), "not int64"),
    "some rows of F for the whole gradient": (
        lambda: gradient_of(correlation=torch.ones(4, 8)),
        r"the correlation must be .*\[8, 8\] on cpu, not float32 \[4, 8\]",
    ),
    "too few inverse norms": (
        lambda: gradient_of(inverse_norm_M=torch.ones(1)),
        r"inverse_norm_M must be .*\[2\].*not .*\[1\]",
    ),
    "targets of another width": (lambda: gradient_of(target_KC=torch.ones(2, 4)), r"target_KC must be .*\[2, 8\]"),
    "too few targets": (lambda: gradient_of(target_KC=torch.ones(1, 8)), r"target_KC must be .*\[2, 8\]"),
    "too few firsts": (lambda: gradient_of(first=INDEX[:1]), r"first must be int64 or int32 \[2\]"),
    "floating partners": (
        lambda: gradient_of(first=INDEX, **{**PAIR, "second": torch.ones(2)}),
        "second must be int64 or int32",
    ),
    "a second without a ratio": (lambda: gradient_of(first=INDEX, second=INDEX), "for pairs of targets give"),
    "a ratio without a second": (lambda: gradient_of(first=INDEX, ratio=torch.ones(2)), "for pairs of targets give"),
    "a pair without a first": (lambda: gradient_of(**PAIR), "for pairs of targets give"),
    "a gradient in whole numbers": (lambda: gradient_of(dtype=torch.int32), "a gradient cannot have dtype torch.int32"),
    "a product of another shape": (
        lambda: embedding_gradient(
            torch.ones(2, 4), torch.ones(2, 8), torch.ones(2), torch.ones(2, 8), balance=1.0, scale=1.0
        ),
        r"product_MC must be float32 \[2, 8\] on cpu, not float32 \[2, 4\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shapes_and_dtypes_that_do_not_fit_are_refused_with_their_values(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
