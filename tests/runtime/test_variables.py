"""Wrong values of variables that torch reads while it is imported are refused before that."""

import pytest

from unigrad_fast import cli
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.variables import require_variables

UNDERSTOOD = {
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL", "detail"),
    "PYTORCH_ALLOC_CONF": (
        "expandable_segments:True",
        "max_split_size_mb:512,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8], backend:native,",
    ),
    "OMP_NUM_THREADS": ("1", "16", "4,2"),
}
WRONG = {
    "TORCH_DISTRIBUTED_DEBUG": ("1", "true"),
    "PYTORCH_CUDA_ALLOC_CONF": ("abc", "expandable_segments", "expandable_segments:true"),
    "OMP_NUM_THREADS": ("0", "-1", "all", "2.5"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNDERSTOOD for value in UNDERSTOOD[name]])
def test_what_torch_understands_is_left_alone(name, value):
    environ = {name: value}
    require_variables(environ)
    assert environ == {name: value}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_what_torch_does_not_understand_is_refused_with_what_it_would(name, value):
    with pytest.raises(UserError, match=f"^{name} = {value}: expected .*; change it or unset it$"):
        require_variables({name: value})


def test_an_empty_variable_is_as_if_unset():
    environ = {"TORCH_DISTRIBUTED_DEBUG": "", "OMP_NUM_THREADS": " ", "PATH": ""}
    require_variables(environ)
    assert environ == {"PATH": ""}


def test_the_command_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "1")
    assert cli.main(["data", "presets"]) == 2
    line = capsys.readouterr().err
    assert line == "error: TORCH_DISTRIBUTED_DEBUG = 1: expected OFF, INFO or DETAIL; change it or unset it\n"
