"""Checks the packages that a run needs, and gives the command that installs missing or unsuitable ones."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys
from pathlib import Path

from unigrad_fast.doctor import Finding, first_line
from unigrad_fast.runtime.nvidia import driver_version
from unigrad_fast.runtime.plotting import plotting
from unigrad_fast.runtime.quiet import quiet_deepspeed

# Name, module, and the requirement for pip, as in setup.py.
PACKAGES = (
    ("torch", "torch", "torch>=2.11,<2.15"),
    ("torchvision", "torchvision", "torchvision>=0.26"),
    ("DeepSpeed", "deepspeed", "deepspeed==0.19.8"),
    ("NumPy", "numpy", "numpy>=1.26"),
    ("Pillow", "PIL", "pillow>=10"),
    ("safetensors", "safetensors", "safetensors>=0.4.3"),
    ("TensorBoard", "tensorboard", "tensorboard>=2.16"),
    ("Matplotlib", "matplotlib", "matplotlib>=3.8"),
)
DALI = {"12": "nvidia-dali-cuda120>=2.0,<3", "13": "nvidia-dali-cuda130>=2.0,<3"}  # by CUDA's major version
PLAIN = {name for name, *_ in PACKAGES[3:]}  # share a row unless there is a problem
OPTIONAL = {"DALI", "DeepSpeed"}  # some parts can be tried without them


def findings() -> list[Finding]:
    """A row for each package that a run needs."""
    found = [_package(*package) for package in PACKAGES]
    plain = [each for each in found if each.name in PLAIN and not each.is_problem]
    return [
        Finding("Python", f"{platform.python_version()}, {sys.executable}"),
        *(each for each in found if each not in plain),
        _dali(),
        Finding("Triton", _version("triton") or "not installed; not used yet"),
        Finding("others", ", ".join(f"{each.name} {each.found}" for each in plain)),
    ]


def _package(name: str, module: str, requirement: str) -> Finding:
    version = _version(_distribution(requirement))
    if finding := _import_problem(name, module, version, requirement):
        return finding
    if not fits(version, requirement):
        wanted = requirement.removeprefix(_distribution(requirement))
        return Finding(name, f"{version}, but {wanted} is required", "wrong", install(requirement))
    if module == "torch":
        cuda = _torch_cuda()
        version = f"{version}, built for " + (f"CUDA {cuda}" if cuda else "the CPU only")
    if module == "deepspeed" and _lacks_nvcc():
        version = f"{version}; without nvcc it cannot compile its own kernels, and a run needs none of them"
    return Finding(name, version)


def _lacks_nvcc() -> bool:
    """Whether there is a GPU but no CUDA compiler where DeepSpeed looks for it."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    return torch.cuda.is_available() and not (CUDA_HOME and Path(CUDA_HOME, "bin/nvcc").exists())


def _dali() -> Finding:
    installed = {
        requirement: version for requirement in DALI.values() if (version := _version(_distribution(requirement)))
    }
    cuda = _torch_cuda()
    wanted = DALI.get((cuda or "13").partition(".")[0], DALI["13"])
    requirement, version = next(iter(installed.items()), (wanted, None))
    if finding := _import_problem("DALI", "nvidia.dali", version, wanted):
        return finding
    shown = " and ".join(f"{version}, flavour {_distribution(each)[-7:]}" for each, version in installed.items())
    remedy = f"pip uninstall --yes {' '.join(map(_distribution, installed))}; {install(wanted)}"
    if len(installed) > 1:
        return Finding("DALI", f"{shown}, which overwrite each other", "wrong", remedy)
    if not fits(version, requirement):
        return Finding("DALI", f"{shown}, but >=2.0,<3 is required", "wrong", install(requirement))
    if cuda and requirement != wanted and driver_version():
        return Finding("DALI", f"{shown}, but torch is built for CUDA {cuda}", "note", remedy)
    return Finding("DALI", shown)


def _import_problem(name: str, module: str, version: str | None, requirement: str) -> Finding | None:
    error = _import_error(module)
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return Finding(name, "not installed", "missing", install(requirement))
    if version is None and error is None:
        return Finding(name, "unknown version, not installed by pip", "wrong", install(requirement))
    if error is None:
        return None
    remedy = install(requirement, "--force-reinstall --no-deps")
    if isinstance(error, ModuleNotFoundError) and error.name:
        needed = error.name.partition(".")[0]
        remedy = install({module: requirement for _, module, requirement in PACKAGES}.get(needed, needed))
    elif re.search(r"lib(cuda|nvidia)", str(error)):
        remedy = f"install NVIDIA's driver, or start the container with --gpus all; otherwise {remedy}"
    return Finding(name, f"{version or 'installed'}, but its import fails: {first_line(error)}", "broken", remedy)


def _import_error(module: str) -> Exception | None:
    """The error from importing a package, or None; the package stays imported."""
    try:
        if module == "deepspeed":
            quiet_deepspeed()
        elif module == "matplotlib":
            with plotting():  # as everything that draws
                pass
        else:
            importlib.import_module(module)
    except Exception as error:
        return error
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for."""
    torch = sys.modules.get("torch")
    return torch and torch.version.cuda


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def fits(version: str, requirement: str) -> bool:
    """Whether the numbers of a version are within a requirement's bounds."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))

    compare = {"==": tuple.__eq__, ">=": tuple.__ge__, "<": tuple.__lt__}
    return all(
        compare[sign](numbers(version), numbers(bound)) for sign, bound in re.findall(r"(==|>=|<)([\d.]+)", requirement)
    )


def install(requirement: str, options: str = "") -> str:
    """The command that installs a requirement."""
    quoted = f"'{requirement}'" if re.search(r"[<>]", requirement) else requirement
    return " ".join(f"pip install {options} {quoted}".split())
