"""Files that other programs saved: torchvision's, published checkpoints, exports. Code in them is never executed.

A file is a state dict, alone or among other things, under any keys. The backbone in it is found by its tensors: there
is a prefix under which all of them have the names and shapes of torchvision's, or of a Sequential of its children.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unigrad_fast.networks.backbones import BUILDERS, build_backbone
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.files import utf8_path
from unigrad_fast.runtime.validation import shown

# Names of the children of a ResNet in a Sequential of them.
CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
AROUND = {"module", "_orig_mod", "model", "state_dict"}  # parts of a name that tell nothing: of wrappers and of files
# What stands before a backbone's names, without those parts: of several in a file the first is taken.
PREFIXES = {
    "": "torchvision, SwAV, exports; Barlow Twins, VICReg and DINO where they publish the backbone alone",
    "encoder_q": "MoCo",
    "base_encoder": "MoCo v3",
    "teacher.backbone": "DINO, which judges its teacher",
    "backbone": "Barlow Twins, VICReg, solo-learn, MMSelfSup",
    "encoder": "SimSiam, the UniGrad authors",
    "online_backbone": "BYOL-PyTorch of chigur",
    "online_network.encoder": "BYOL-PyTorch of yaox12",
    "online_network_state_dict.encoder": "PyTorch-BYOL of sthalles",
    "online_encoder.net": "byol-pytorch of lucidrains",
    "net": "byol-pytorch of lucidrains, whose learner was saved",
}
LISTED = 5  # names in a message
WHOLE = "copy or download it again, or give a file of torch.save or a .safetensors"


class _NotRead:
    """Takes the place of an object without tensors, such as the arguments of a training."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __new__(cls, *arguments: Any) -> _NotRead:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _dictionary(*arguments: Any) -> OrderedDict:
    return OrderedDict()


INERT = (
    *("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("argparse.Namespace", "types.SimpleNamespace", "typing.Any"),
    *(f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "int", "list", "str")),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath"),
    *(f"omegaconf.{name}" for name in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata")),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "Boolean", "Bytes", "Float", "Integer", "Path", "String")),
)
DICTIONARIES = (
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
)
ALLOWED: list[Any] = [
    *((_NotRead, name) for name in INERT),
    *((OrderedDict, name) for name in DICTIONARIES),
    (_dictionary, "collections.defaultdict"),
]


@dataclass(frozen=True)
class Backbone:
    """The weights of a backbone that a file holds.

    Attributes:
        state: fp32 tensors under torchvision's names, complete.
        stem: "imagenet" or "small".
        prefix: what stood before the names in the file, with a trailing dot; empty if nothing.
        left_out: what else is in the file.
    """

    state: dict[str, Tensor]
    stem: str
    prefix: str
    left_out: list[str]


def load(file: Path) -> Mapping[str, Any]:
    """The content of a file of torch.save, or of a safetensors file.

    Raises:
        UserError: it cannot be read, holds something else, or an object whose loading could run code.
    """
    try:
        if file.suffix.lower() == ".safetensors":
            with utf8_path(file) as name:
                return load_file(name)
        with torch.serialization.safe_globals(ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}; give another file") from None
    except SafetensorError as error:
        raise UserError(f"{file}: not a safetensors file, or damaged ({error}); {WHOLE}") from None
    except Exception as error:  # arbitrary bytes read as a pickle can raise anything
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{file}: holds an object of {found[1]}, and loading it could run code that is hidden in the file. "
                "If you trust the source of the file, save only its weights, where the code that wrote it is "
                "installed, replacing 'model' by the key of the weights: "
                f"import torch; model = torch.load({str(file)!r}, weights_only=False)['model']; "
                "torch.save(getattr(model, 'state_dict', lambda: model)(), 'weights.pth')"
            ) from None
        raise UserError(f"{file}: not a file written by torch.save, or damaged; {WHOLE}") from None
    if not isinstance(content, Mapping):
        raise UserError(
            f"{file}: holds a {type(content).__name__}; expected a dictionary of weights; save a state_dict()"
        )
    return content


def backbone_in(file: Path, name: str) -> Backbone:
    """The backbone of a name in a file.

    Raises:
        UserError: the file cannot be read, none of its parts has all tensors of the backbone in their shapes, or
            several have and none is known, or one of its tensors is not of dense floats.
    """
    content = load(file)
    try:
        tensors = dict(_tensors(content))
    except RecursionError:
        raise UserError(
            f"{file}: holds a dictionary within itself, or too many within one another; save the weights alone, "
            "with torch.save"
        ) from None
    found = {prefix: _under(tensors, prefix) for prefix in _prefixes(tensors)}
    if not found:
        raise UserError(
            f"{file}: holds no weights of a {name}, whose first convolution is called conv1.weight (or 0.weight); it "
            f"holds {listed(list(tensors or content)) or 'nothing'}"
        )
    problems = {prefix: _problems(state, name) for prefix, state in found.items()}
    known = [prefix for prefix in found if _bare(prefix) in PREFIXES]
    whole = [prefix for prefix in found if not problems[prefix]]
    if not known and len(whole) > 1:
        raise UserError(
            f"{file}: holds several backbones, {listed(whole)}; save the one that you mean alone, with torch.save"
        )
    order = list(PREFIXES)
    prefix = min(known, key=lambda each: order.index(_bare(each))) if known else (whole or list(found))[0]
    if problems[prefix]:
        others = len(problems[prefix]) - 1
        fitting = [other for other in BUILDERS if other != name and not _problems(found[prefix], other)]
        raise UserError(
            f"{file}: does not fit {name}: {prefix}{problems[prefix][0]}"
            + (f", and so on for {others:,} more tensors" if others else "")
            + (f"; it is a {fitting[0]}, so give --backbone {fitting[0]}" if fitting else "")
        )
    expected, stem = _expected(found[prefix], name)
    for key in filter(found[prefix].__contains__, expected):
        if kind := _odd_kind(found[prefix][key], key.endswith("num_batches_tracked")):
            raise UserError(f"{file}: {prefix}{key} is {kind}; save the weights as dense tensors of floats")
    state = {key: found[prefix].get(key, torch.zeros(shape)).detach().float() for key, shape in expected.items()}
    state = {key: tensor.long() if key.endswith("num_batches_tracked") else tensor for key, tensor in state.items()}
    return Backbone(state, stem, prefix, _left_out(content, tensors, prefix, expected))


def _tensors(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a tree under their dotted names; a wrapper's key at the top, such as state_dict, is dropped."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{path}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, "" if not path and key in AROUND else f"{path}{key}.")


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """What stands before the name of a first convolution of images."""
    first = re.compile(r"(.*\.)?(conv1|0)\.weight")
    matches = [(match, tensors[key]) for key in tensors if (match := first.fullmatch(key))]
    return list(
        dict.fromkeys(match[1] or "" for match, tensor in matches if tensor.dim() == 4 and tensor.shape[1] == 3)
    )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, under torchvision's names."""
    state = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            child, dot, leaf = key.removeprefix(prefix).partition(".")
            state[CHILDREN.get(child, child) + dot + leaf] = tensor
    return state


def _expected(state: Mapping[str, Tensor], name: str) -> tuple[dict[str, torch.Size], str]:
    """Shapes of a backbone's tensors, with the stem that the first convolution has; and the stem."""
    stem = "small" if state["conv1.weight"].shape[-1] == 3 else "imagenet"
    with torch.device("meta"):
        return {key: tensor.shape for key, tensor in build_backbone(name, stem).state_dict().items()}, stem


def _problems(state: Mapping[str, Tensor], name: str) -> list[str]:
    """What a state dict lacks, or has beyond or otherwise than a backbone; without counters, which old files lack."""
    expected, problems = _expected(state, name)[0], []
    for key, shape in expected.items():
        if key not in state and not key.endswith("num_batches_tracked"):
            problems.append(f"{key} is missing")
        elif key in state and state[key].shape != shape:
            problems.append(f"{key} has the shape {list(state[key].shape)} instead of {list(shape)}")
    more = [key for key in state if key.partition(".")[0] in CHILDREN.values() and key not in expected]
    return problems + [f"{key} is not in a {name}" for key in more]


def _odd_kind(tensor: Tensor, is_counter: bool) -> str | None:
    """What a tensor is instead of one of dense floats, or of any real numbers for a counter; None if it is one."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_complex() or not (is_counter or tensor.is_floating_point()):
        return f"of the dtype {str(tensor.dtype)[6:]}"
    return None


def _bare(prefix: str) -> str:
    return ".".join(part for part in prefix.split(".") if part and part not in AROUND)


def _left_out(content: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, taken: Mapping) -> list[str]:
    """Names of the other parts: of those beside the backbone's tensors, and of what holds no tensors."""
    numbers = {name: number for number, name in CHILDREN.items()}
    own = set()
    for key in taken:
        child, dot, leaf = key.partition(".")
        own |= {prefix + key, prefix + numbers.get(child, child) + dot + leaf}
    beside = [_apart(key, prefix) for key in tensors if key not in own]
    return list(dict.fromkeys([*beside, *(str(key) for key, value in content.items() if not _holds_tensors(value))]))


def _apart(key: str, prefix: str) -> str:
    """The name of a tensor as far as it takes to tell it from those below a prefix."""
    parts, common = key.split("."), prefix.split(".")[:-1]
    same = (place for place, part in enumerate(parts) if common[place : place + 1] != [part])
    return ".".join(parts[: next(same, len(parts)) + 1])


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Mapping) and next(_tensors(value), None) is not None)


def listed(names: list[str]) -> str:
    """The first names, for a message."""
    return ", ".join(shown(name) for name in names[:LISTED]) + (", ..." if len(names) > LISTED else "")
