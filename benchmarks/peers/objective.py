"""The compared implementations of the objective: the authors', optimised plain torch, ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unigrad_fast.benchmarks.counts.roofline import DTYPES, Design, float32_products
from unigrad_fast.benchmarks.peers.authors import authors_loss
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime.precision import has_fast_bf16

BALANCE, DECAY = 100.0, 0.99
WIDEST_COMPILED_ON_CPU = 8192

Views = Sequence[Tensor]


def release(online: Views) -> None:
    """Free the gradients."""
    for z in online:
        z.grad = None


class Variant:
    """An implementation of the objective; `step` leaves the gradients in the online embeddings.

    Args:
        precision: a key of DTYPES.
        width: C.
        device: device of the embeddings.
    """

    name: str
    correlation: Tensor  # F, [C, C]
    may_fail = False  # whether torch or the machine may lack support; then the failure is reported, not raised

    def __init__(self, precision: str, width: int, device: torch.device):
        self.precision, self.device = precision, device
        self.design = Design.of(precision, device)

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}"

    def step(self, online: Views, target: Views) -> None:
        release(online)
        with float32_products(self.precision):
            self.compute(online, target)

    def compute(self, online: Views, target: Views) -> None:
        raise NotImplementedError

    def correlation_bytes(self) -> int:
        """Bytes of F and other state that is kept between steps."""
        return self.correlation.nbytes


class Authors(Variant):
    name = "authors"
    correlation = None  # before the first step

    def compute(self, online: Views, target: Views) -> None:
        dtype = DTYPES[self.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss, correlation = authors_loss(online, target, self.correlation, BALANCE, DECAY)
        self.correlation = correlation.to(dtype)
        loss.backward()


class PlainTorch(Variant):
    """Optimised plain torch; `move` updates F with a batch and returns u·F."""

    def __init__(self, precision: str, width: int, device: torch.device, compiled: bool):
        super().__init__(precision, width, device)
        self.correlation = torch.zeros(width, width, device=device)
        self.first = True
        self.compiled = compiled
        self.may_fail = self.may_fail or compiled  # a machine without a compiler, or a torch that cannot compile this
        self.gradient = torch.compile(self._gradient, dynamic=False, fullgraph=True) if compiled else self._gradient

    def __str__(self) -> str:
        return f"{self.name}{' compiled' if self.compiled else ''}, {self.precision}"

    def compute(self, online: Views, target: Views) -> None:
        # Not compiled for the first step, which would need its own graph.
        gradient, decay = (self._gradient, 0.0) if self.first else (self.gradient, DECAY)
        self.first = False
        with torch.no_grad():
            _, gradients = gradient([z.detach() for z in online], target, self.correlation, decay)
        torch.autograd.backward(online, gradients)

    @classmethod
    def _gradient(cls, online: Views, target: Views, moving: Tensor, decay: float) -> tuple[Tensor, Views]:
        """u·g and dz of each view."""
        online_MC = torch.cat([*online])
        norm_M1 = torch.linalg.vector_norm(online_MC, dim=-1, keepdim=True, dtype=torch.float32).clamp_min(1e-12)
        unit_MC = online_MC / norm_M1
        target_MC = F.normalize(torch.cat([*target]).float(), dim=-1)
        gradient_MC = cls.move(moving, unit_MC, target_MC, decay).mul_(BALANCE)
        for view, other in zip(gradient_MC.chunk(2), reversed(target_MC.chunk(2)), strict=True):
            view.sub_(other)
        along_M1 = torch.linalg.vecdot(unit_MC, gradient_MC).unsqueeze(-1)
        gradient_MC.addcmul_(unit_MC, along_M1, value=-1.0).div_(norm_M1.mul_(len(unit_MC)))
        return along_M1.mean(), gradient_MC.to(online_MC.dtype).chunk(2)

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        raise NotImplementedError


class InPlace(PlainTorch):
    name = "torch"

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        moving.addmm_(target_MC.T, target_MC, beta=decay, alpha=(1 - decay) / len(target_MC))
        return unit_MC @ moving


class Lerp(PlainTorch):
    name = "torch lerp"

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        half_MC = (target_MC * len(target_MC) ** -0.5).bfloat16()
        moving.lerp_(torch.mm(half_MC.T, half_MC, out_dtype=torch.float32), 1 - decay)
        return torch.mm(unit_MC.bfloat16(), moving.bfloat16(), out_dtype=torch.float32)


class Addmm(PlainTorch):
    """One operation multiplies bf16 operands and adds the product to F in fp32."""

    name = "torch addmm"
    may_fail = True  # before 2.10, torch requires F in the operands' dtype

    @staticmethod
    def move(moving: Tensor, unit_MC: Tensor, target_MC: Tensor, decay: float) -> Tensor:
        # The compiler splits this addmm into a product and a pass over F, but keeps a custom operator whole.
        add = torch.ops.unigrad_fast_bench.add_product_ if torch.compiler.is_compiling() else add_product_
        add(moving, target_MC.bfloat16(), decay)
        return torch.mm(unit_MC.bfloat16(), moving.bfloat16(), out_dtype=torch.float32)


def add_product_(moving: Tensor, half_MC: Tensor, decay: float) -> None:
    """F ← ρ·F + (1−ρ)·mᵀm / M in place, on a GPU."""
    scale = (1 - decay) / len(half_MC)
    torch.addmm(moving, half_MC.T, half_MC, out_dtype=torch.float32, beta=decay, alpha=scale, out=moving)


torch.library.custom_op("unigrad_fast_bench::add_product_", add_product_, mutates_args=("moving",))


class Ours(Variant):
    name = "ours"

    def __init__(self, precision: str, width: int, device: torch.device):
        super().__init__(precision, width, device)
        self.dtype = DTYPES[precision]
        on_cpu = device.type == "cpu" and self.dtype != torch.float32
        self.objective = UniGrad(width, BALANCE, DECAY, compute_dtype=self.dtype if on_cpu else None).to(device)

    def compute(self, online: Views, target: Views) -> None:
        on_gpu = self.device.type == "cuda" and self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=on_gpu):
            output = self.objective(online=online, target=target)
        output.loss.backward()

    @property
    def correlation(self) -> Tensor:
        return self.objective.correlation

    def correlation_bytes(self) -> int:
        return self.objective.average.nbytes


KINDS = (Authors, PlainTorch, Ours)
ON_GPU = (Lerp, Addmm)  # they need products of half-precision matrices with fp32 results, which torch has only on GPUs


def left_out(device: torch.device) -> list[str]:
    """Names of the variants that a device does not support."""
    return [] if device.type == "cuda" and has_fast_bf16(device) else [kind.name for kind in ON_GPU]


def variants(width: int, device: torch.device, compiled: bool) -> list[Variant]:
    """All variants that a device supports."""
    on_gpu = device.type == "cuda"
    single = ("fp32", "tf32") if on_gpu else ("fp32",)
    half = ("bf16",) if has_fast_bf16(device) else ()
    ways = (False, True) if compiled and (on_gpu or width <= WIDEST_COMPILED_ON_CPU) else (False,)
    return [
        *(Authors(precision, width, device) for precision in single),
        *(Authors(precision, width, device) for precision in ("fp16", *half) if on_gpu),
        *(InPlace(precision, width, device, way) for precision in single for way in ways),
        *(kind(precision, width, device, way) for kind in ON_GPU for precision in half for way in ways if on_gpu),
        *(Ours(precision, width, device) for precision in (*single, *half)),
    ]
