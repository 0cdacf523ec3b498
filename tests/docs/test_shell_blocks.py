"""The commands on the pages: each is resolved against the options that there are."""

from __future__ import annotations

import itertools

import pytest
from command_lines import commands, problems
from pages import PAGES, fences, kept_from_git, named_commands, run_lines, shell_lines

from unigrad_fast.cli import main
from unigrad_fast.commands import COMMANDS

KINDS = {"python": "runs", "sh": "is resolved, or runs", "text": "is shown", "yaml": "is shown"}
SLOW = ("data.md",)  # decodes and starts processes
TO_RUN = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
    for page in PAGES
    if run_lines(page)
]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request):
    return request.param


def test_every_block_says_what_it_is(page):
    assert {kind for kind, _ in fences(page)} <= KINDS.keys()


def test_the_command_lines_of_a_page_have_options_that_exist(page):
    lines = list(shell_lines(page))
    for place, line in enumerate(lines):
        said = itertools.takewhile(lambda after: after.startswith("error: "), lines[place + 1 :])
        shown = [after.removeprefix("error: ") for after in said]
        found = problems(line)
        # What is refused is shown with what is said of it; what only a run refuses is shown too.
        assert not found or found == shown, line


@pytest.mark.parametrize("page", TO_RUN)
def test_the_blocks_that_are_marked_so_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in run_lines(page):
        for program, *arguments in commands(line):
            assert program == "unigrad-fast"
            try:
                status = main(arguments)
            except SystemExit as left:  # as of --help
                status = left.code
            assert not status, line
    assert kept_from_git(tmp_path)


def test_what_commands_write_without_being_told_where_is_kept_from_git(tmp_path):
    fields = [options.model_fields["output"] for options, _ in COMMANDS.values() if "output" in options.model_fields]
    here = {field.default.name for field in fields if field.default is not None}
    assert here > {"plan", "preview.png"}
    for name in here:
        (tmp_path / name).touch()
    assert kept_from_git(tmp_path)
    (tmp_path / "stray.png").touch()
    assert not kept_from_git(tmp_path)


def test_the_commands_in_the_text_of_a_page_exist(page):
    for named in named_commands(page):
        assert not problems(named, whole=False), named


@pytest.mark.parametrize(
    "line",
    [
        "unigrad-fast pretrain --data.bach_size 3",
        "unigrad-fast pretrain --recipe imagenet_101ep --data.train FOLDER",
        "$ unigrad-fast pretrain --model.projector.depth 9",
        "unigrad-fast evaluate kn RUN",
        "unigrad-fast evaluate linear RUN [--protocol quick|papers]",
        "unigrad-fast export --format torchvision",
        "unigrad-fast checkpoint show|verifies RUN    # a comment",
        "torchrun --nproc_per_nod 8 -m unigrad_fast doctor",
        "torchrun --nproc_per_node 8 -m unigrad_fast pretrain --recipe imagenet_100ep --lr 3",
        "srun --cpus-per-task 12 python -m unigrad_fast pretrain --recipe imagenet_800",
        "deepspeed --hostfile hosts --module unigrad_fast pretrain --recipes imagenet_800ep",
        "python -m unigrad_fast.benchmarks.device_check --onyl data",
        "make quickstrat",
        "make bench OUT=FOLDER",
        "pip install '.[cuda11]'",
    ],
)
def test_a_line_that_names_what_does_not_exist_is_found(line):
    assert problems(line)


def test_a_line_is_resolved_with_all_that_it_offers():
    assert commands("unigrad-fast export RUN [--branch online|target]  # either") == [
        ["unigrad-fast", "export", "RUN", "--branch", branch] for branch in ("online", "target")
    ]
    assert not problems("unigrad-fast pretrain --recipe imagenet_100ep_METHOD --data.train FOLDER | head")
