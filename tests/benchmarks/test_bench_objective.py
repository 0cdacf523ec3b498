"""The benchmark of the objective: its variants compute the same, its counts are sums, its memory is what is taken."""

import json
import os
import shutil
from functools import partial

import pytest
import torch

from unigrad_fast import cli
from unigrad_fast.benchmarks.counts.roofline import Design, Peaks, launches, measure_peaks
from unigrad_fast.benchmarks.harness.memory import peak_bytes
from unigrad_fast.benchmarks.measures import objective as objective_measure
from unigrad_fast.benchmarks.peers.objective import (
    BALANCE,
    DECAY,
    ON_GPU,
    Addmm,
    Authors,
    InPlace,
    Lerp,
    Ours,
    release,
    variants,
)
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime.precision import has_fast_bf16

CPU = torch.device("cpu")


def batches(count: int, images: int, width: int):
    """Views of several batches that differ, and the same for every caller."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        values = torch.randn(4, images, width, generator=generator)
        yield [z.clone().requires_grad_() for z in values[:2]], list(values[2:])


needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(InPlace, compiled=False), id="torch"),
        pytest.param(partial(InPlace, compiled=True), id="compiled", marks=needs_compiler),
        pytest.param(Ours, id="ours"),
    ],
)
def test_variant_has_the_authors_gradient_and_correlation(make):
    variant, authors = make("fp32", 48, CPU), Authors("fp32", 48, CPU)
    for theirs, ours in zip(batches(3, 8, 48), batches(3, 8, 48), strict=True):
        authors.step(*theirs)
        variant.step(*ours)
        for z, expected in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(z.grad, expected.grad, rtol=1e-4, atol=1e-6)
        # Means of 16 products that come to 1/48 or so, of rounded factors: 2·(16 + 4)·2⁻²⁴/48 is 5e-8.
        torch.testing.assert_close(variant.correlation, authors.correlation, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp32 results of half-precision products need a GPU")
@pytest.mark.parametrize("kind", [Authors, *ON_GPU, Ours])
def test_half_precision_is_the_same_up_to_its_rounding(kind):
    device = torch.device("cuda")
    variant = kind("bf16", 256, device, *([False] if kind in ON_GPU else []))
    views = objective_measure.draw_embeddings(64, 256, device, torch.bfloat16)
    for _ in range(3):
        variant.step(*views)
    assert objective_measure.gradient_error(*views) < 2e-2
    assert variant.correlation.dtype == (torch.bfloat16 if kind is Authors else torch.float32)


@pytest.mark.parametrize("kind", ON_GPU)
def test_what_runs_on_a_gpu_only_computes_the_same_where_its_products_are_stood_in_for(monkeypatch, kind):
    """torch's own check of the arguments, then the product of the rounded operands in fp32."""
    plain_mm, plain_addmm = torch.mm, torch.addmm

    def mm(a, b, *, out_dtype):
        assert plain_mm(a.to("meta"), b.to("meta"), out_dtype=out_dtype).dtype == torch.float32
        return plain_mm(a.float(), b.float())

    def addmm(F, a, b, *, out_dtype, beta, alpha, out):
        checked = [x.to("meta") for x in (F, a, b)]
        plain_addmm(*checked, out_dtype=out_dtype, beta=beta, alpha=alpha, out=checked[0])
        return out.copy_(plain_addmm(F, a.float(), b.float(), beta=beta, alpha=alpha))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    variant, authors = kind("bf16", 48, CPU, compiled=False), Authors("fp32", 48, CPU)
    for theirs, ours in zip(batches(3, 8, 48), batches(3, 8, 48), strict=True):
        authors.step(*theirs)
        variant.step(*ours)
        expected, found = (torch.cat([z.grad for z in views[0]]) for views in (theirs, ours))
        assert torch.linalg.vector_norm(found - expected) < 1e-2 * torch.linalg.vector_norm(expected)
        torch.testing.assert_close(variant.correlation, authors.correlation, rtol=1e-2, atol=1e-4)


def test_a_variant_that_torch_refuses_is_named_and_the_others_are_measured():
    chosen = [
        Authors("fp32", 32, CPU),
        InPlace("fp32", 32, CPU, compiled=False),
        Addmm("bf16", 32, CPU, compiled=False),
    ]
    measured = objective_measure.measure([*chosen, Ours("fp32", 32, CPU)], 4, 32, 1, 0.0, 0.0, lambda _: None)
    rows = {row["what"]: row for row in (each.row(Peaks({"fp32": 1.0, "bf16": 1.0}, 1.0)) for each in measured)}
    assert rows["torch addmm, bf16"]["failed"].startswith("NotImplementedError")
    assert [name for name, row in rows.items() if row["median"] is None] == ["torch addmm, bf16"]
    assert all("addmm" not in row["what"] for row in objective_measure.ratio_rows(measured))


def test_exact_gradient_is_that_of_float64():
    online, target = objective_measure.draw_embeddings(8, 48, CPU, torch.float64)
    objective = UniGrad(48, BALANCE, DECAY)
    for _ in range(2):
        release(online)
        objective(online=online, target=target).loss.backward()
    assert objective_measure.gradient_error(online, target) < 1e-12


def test_gradient_error_knows_half_of_the_gradient():
    online, target = objective_measure.draw_embeddings(8, 48, CPU, torch.float32)
    for z, gradient in zip(online, objective_measure.exact_gradient(online, target).chunk(2), strict=True):
        z.grad = gradient.float() / 2
    assert objective_measure.gradient_error(online, target) == pytest.approx(0.5, rel=1e-5)


def test_bytes_are_the_sum_of_the_arrays_that_pass():
    M, C = 6, 512
    upper = C * C // 2
    half, single = Design("bf16", "bf16", "bf16", 128), Design("fp32", "fp32", "fp32", 128)
    z, u, row = 2 * M * C, 2 * M * C, 4 * M * C
    assert half.bytes("unit_embeddings", M, C) == z + u
    assert half.bytes("update_correlation", M, C) == u + 4 * upper + 4 * upper + 2 * upper
    assert half.bytes("correlation_product", M, C) == u + 2 * C * C + row
    assert half.bytes("embedding_gradient", M, C) == row + u + u + row
    assert half.bytes("backward", M, C) == row + z
    assert single.bytes("unit_embeddings", M, C) == row + row
    assert single.bytes("update_correlation", M, C) == row + 4 * upper + 4 * C * C
    assert single.bytes("correlation_product", M, C) == row + 4 * C * C + row
    assert single.bytes("embedding_gradient", M, C) == 4 * row


@pytest.mark.parametrize("block", [128, 512])
def test_flops_are_the_sum_over_the_blocks_of_the_upper_triangle(block):
    M, C = 6, 2048
    design = Design("fp32", "fp32", "fp32", block)
    firsts = range(0, C, block)
    blocks = sum(2 * M * block * block for i in firsts for j in firsts if i <= j)
    assert design.flops("update_correlation", M, C) == blocks
    assert design.flops("correlation_product", M, C) == sum(2 * M for _ in range(C) for _ in range(C))


def test_roofline_takes_the_slower_of_arithmetic_and_memory_kernel_by_kernel():
    design, N, C = Design("fp32", "fp32", "bf16", 128), 4, 256
    times = {"unit_embeddings": 0.0, "update_correlation": 0.0, "correlation_product": 0.0, "embedding_gradient": 0.0}
    peaks = Peaks({"fp32": 1.0, "bf16": 1e30}, copy=10.0)
    for kernel, M in launches(N).items():
        times[kernel] = design.bytes(kernel, M, C) / 10.0
    times["update_correlation"] = float(design.flops("update_correlation", 2 * N, C))
    assert peaks.least_seconds(design, N, C) == pytest.approx(sum(times.values()))


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("UNIGRAD_KERNELS", "cuda")
    assert cli.main(["bench", "kernels", "--width", "8", "--images", "2"]) == 2
    assert "UNIGRAD_KERNELS=cuda is unknown; use triton or torch" in capsys.readouterr().err


def test_peaks_are_measured_for_every_precision():
    peaks = measure_peaks({"fp32", "bf16"}, CPU, side=64, elements=1000)
    assert peaks.flops.keys() == {"fp32", "bf16"}
    assert min(*peaks.flops.values(), peaks.copy) > 0


def test_peak_memory_sees_what_operators_take_for_a_while():
    held = []

    def run():
        held.append(torch.empty(1000))
        torch.empty(500)
        _takes(torch.empty(0))

    assert peak_bytes(run, held.clear, CPU) == 4 * (1000 + 3000)


@torch.library.custom_op("bench_objective_test::takes", mutates_args=())
def _takes(like: torch.Tensor) -> torch.Tensor:
    torch.empty(3000)
    return like.clone()


def test_peak_memory_counts_what_a_run_replaces_as_given_back():
    kept = [torch.empty(0)]

    def run():
        kept[0] = None
        kept[0] = torch.empty(1000)
        torch.empty(600)

    assert peak_bytes(run, lambda: None, CPU) == 4 * 600


def test_compiled_variant_that_cannot_be_compiled_says_so(monkeypatch):
    def broken(function, **_):
        def fail(*_):
            raise RuntimeError("no compiler\nat all")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    chosen = variants(32, CPU, compiled=True)
    measured = objective_measure.measure(chosen, 4, 32, 1, 0.0, 0.0, lambda _: None)
    rows = {row["what"]: row for row in (each.row(Peaks({"fp32": 1.0, "bf16": 1.0}, 1.0)) for each in measured)}
    assert rows["torch compiled, fp32"]["failed"] == "RuntimeError: no compiler"
    assert rows["torch compiled, fp32"]["median"] is None
    assert rows["torch, fp32"]["median"] > 0
    assert all("compiled" not in row["what"] for row in objective_measure.ratio_rows(measured))


def test_ratios_are_against_the_better_and_no_less_exact():
    measured = {}
    for name, variant in {
        "authors": Authors("fp32", 8, CPU),
        "torch": InPlace("fp32", 8, CPU, compiled=False),
        "compiled": InPlace("fp32", 8, CPU, compiled=True),
        "lerp": Lerp("bf16", 8, CPU, compiled=False),
        "fp32": Ours("fp32", 8, CPU),
        "bf16": Ours("bf16", 8, CPU),
    }.items():
        measured[name] = objective_measure.Measured(variant, 4, 8)
    for name, times in {
        "authors": [80.0, 40.0, 40.0],
        "torch": [20.0, 20.0, 20.0],
        "compiled": [30.0, 30.0, 10.0],
        "lerp": [8.0, 8.0, 8.0],
        "fp32": [10.0, 10.0, 10.0],
        "bf16": [2.0, 4.0, 4.0],
    }.items():
        measured[name].milliseconds = times
    rows = {(row["what"], row["against"]): row for row in objective_measure.ratio_rows(list(measured.values()))}
    assert {key: row["median"] for key, row in rows.items()} == {
        ("ours, fp32 / authors, fp32", "authors"): 4.0,
        ("ours, fp32 / torch, fp32", "best of torch"): 2.0,
        ("ours, bf16 / authors, fp32", "authors"): 10.0,
        ("ours, bf16 / torch lerp, bf16", "best of torch"): 2.0,
        ("ours, bf16 / ours, fp32", "ours in fp32"): 2.5,
    }
    assert rows["ours, fp32 / authors, fp32", "authors"].items() >= {"least": 4.0, "most": 8.0}.items()


def test_every_variant_is_measured_and_recorded(tmp_path, capsys):
    output = tmp_path / "new" / "rows"
    options = ["--width", "64", "--images", "8", "--repetitions", "2", "--block_seconds", "0", "--compiled", "false"]
    assert cli.main(["bench", "kernels", *options, "--output", str(output)]) == 0
    rows = [json.loads(line) for line in (output / "objective.jsonl").read_text().splitlines()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = variants(64, torch.device(device), compiled=False)
    measured = [row for row in rows if row["unit"] == "ms"]
    assert [row["what"] for row in measured] == [str(variant) for variant in chosen]
    for row in measured:
        assert 0 < row["least"] <= row["median"] <= row["most"]
        assert min(row["tflops"], row["gb_per_s"], row["roofline_share"], row["memory_nc"]) > 0
        assert row["failed"] is None
        assert row["gradient_error"] < (1e-5 if row["what"].endswith("fp32") else 0.1)
    by_name = {row["what"]: row for row in measured}
    # Beside its gradients the authors' formulation has four matrices of F's size.
    assert by_name["authors, fp32"]["memory_nc"] >= 4 * 64 / 8
    assert by_name["ours, fp32"]["correlation_bytes"] == 4 * 64 * 64
    if has_fast_bf16(torch.device(device)):
        assert by_name["ours, bf16"]["correlation_bytes"] == (4 + 2) * 64 * 64
    assert {row["against"] for row in rows if row["unit"] == "ratio"} >= {"authors", "best of torch"}
    setting = {"width": 64, "images": 8, "device": device, "rounds": 2}
    for row in rows:
        assert row.items() >= setting.items()
        assert row.keys() >= {"commit", "processor", "torch", "threads", "peak_tflops", "peak_gb_per_s"}
    shown = capsys.readouterr().out
    assert all(row["what"] in shown for row in rows)
    names = {variant.name for variant in chosen}
    assert all(kind.name in names or kind.name in shown for kind in ON_GPU)
