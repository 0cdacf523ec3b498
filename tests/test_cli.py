"""The command line: exit statuses, messages without tracebacks, and what each command is called with."""

import errno
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from unigrad_fast import cli
from unigrad_fast.config import resolve, to_yaml
from unigrad_fast.evaluation.runs import Asked
from unigrad_fast.runtime.errors import DataError, RunStopped, UserError
from unigrad_fast.runtime.packages import NEEDED
from unigrad_fast.runtime.trees import parse_arguments
from unigrad_fast.runtime.validation import Node, keys, validate

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """Collects the configurations that the trainer is called with, instead of training."""
    calls = []
    monkeypatch.setattr(
        "unigrad_fast.training.loop.pretrain",
        lambda config, verbose, **_: calls.append((config, verbose)),
    )
    return calls


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    """Lines on stderr of a command that must end with status 2."""
    assert cli.main(arguments) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["evaluate", "--help"], ["data", "-h"]])
def test_overview_lists_commands_and_recipes(arguments, capsys):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for name in (*cli.COMMANDS, "quickstart", "imagenet_100ep", "cifar_subset"):
        assert name in text


def test_help_of_pretrain_shows_the_values_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["pretrain", "--recipe", "cifar_subset", "--help"])
    assert ended.value.code == 0
    text = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "--data.batch_size INT Images per optimizer step, over all ranks and accumulation steps" in text
    assert "(default: 128)" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_what_is_accepted(name, capsys, monkeypatch):
    """Every key with every form of its value, and every default."""
    monkeypatch.setenv("COLUMNS", "0")
    with pytest.raises(SystemExit):
        cli.main([*name.split(), "--help"])
    said = capsys.readouterr().out
    options, positionals = cli.COMMANDS[name][0], cli.positionals(cli.COMMANDS[name][0])
    assert said.startswith(" ".join([f"usage: unigrad-fast {name}", *map(str.upper, positionals)]))
    shown = re.findall(r"^  --(\S+) (\S+)\n((?:      .*\n?)+)", said, re.MULTILINE)
    assert {*positionals, *(key for key, *_ in shown)} == set(keys(options))
    for key, forms, description in shown:
        default = re.search(r"\(default:\s+(.+)\)\s*$", description)[1]
        for written in [default, *forms.split("|")]:
            accepted = [
                not problems(options, parse_arguments([f"--{key}={value}"]), key)
                for value in SAMPLES.get(written, (written,))
            ]
            assert any(accepted), (key, written)


SAMPLES = {
    **{"INT": ("0", "2", "16", "1e3"), "FLOAT": ("0.5", "1"), "STR": ("quickstart",), "PATH": ("some/where",)},
    **{"vicreg,...": ("vicreg", "moco,vicreg"), "swav,...": ("swav", "moco,swav"), "INT,...": ("2", "2,16")},
    **{"original,...": ("original", "gradient,original"), "mixed,...": ("mixed", "momentum,mixed")},
    **{"pixels,...": ("pixels", "files,hf")},
    **{"FLOAT,FLOAT": ("0.5,1",), "FLOAT,FLOAT,FLOAT,FLOAT": ("0.1,0.1,0.1,0.1",)},
}


def problems(options: type[Node], tree: dict, key: str) -> list[str]:
    """What is said of a key's own value."""
    try:
        validate(options, tree)
    except UserError as error:
        return [line for line in str(error).splitlines() if line.startswith(f"{key} = ") and ": must be" in line]
    return []


def test_print_config_can_be_fed_back(capsys, tmp_path):
    assert cli.main(["pretrain", "--recipe", "quickstart", "--seed", "3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed == to_yaml(resolve("quickstart", {"seed": 3}))
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    assert cli.main(["pretrain", "--recipe", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data shard {} out --quality 90", "quality = 90: images are copied unchanged; leave it out"),
        ("data preview {} --preset simsiam --local_views.size 64", "local_views.size = 64: simsiam has no local views"),
        ("bench kernels --compile_only true --width 512", "width = 512: compile_only does not use it; leave it out"),
        ("bench kernels --tune true --output x", "output = "),
        ("data scan {} --threads 100000", "threads = 100000: must be an integer from 1 to 1024 or null"),
        ("data scan {} --read_timeout 1e30", "read_timeout = 1e30: must be a number above 0 to 86400"),
        ("data scan {} --output", "--output: a value is missing; it must be a path or null"),
    ],
)
def test_options_that_would_be_ignored_or_cannot_be_are_refused(words, message, images, capsys):
    (line,) = refused(capsys, *words.format(images).split())
    assert line.startswith(f"error: {message}")


def test_pretrain_gives_the_trainer_the_resolved_tree(trained, images, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pretrain", "--data.train", str(images), "--model.projector.width", "4096", "--verbose"]) == 0
    tree = {"data": {"train": images}, "model": {"projector": {"width": 4096}}}
    expected = resolve("imagenet_100ep", {**tree, "output": tmp_path / "runs/imagenet_100ep"})
    assert trained == [(expected, True)]
    assert type(trained[0][0]) is type(expected)


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (["--recipe", "{tmp}/mine.v2.yaml"], "mine.v2"),
        (["--recipe", "{tmp}/mine.v2.yaml", "--name", "trial"], "trial"),
        (["--recipe", "cifar_subset"], "cifar_subset"),
    ],
)
def test_a_run_is_named_by_its_recipe_or_the_file_of_it(given, folder, trained, images, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.v2.yaml").write_text("recipe: quickstart\ndata: {val: null}\n")
    words = [word.format(tmp=tmp_path) for word in given]
    assert cli.main(["pretrain", "--data.train", str(images), *words]) == 0
    assert trained[0][0].output == tmp_path / "runs" / folder


@pytest.mark.parametrize("name", ["a/b", "..", "/", "../a"])
def test_a_name_that_is_a_path_is_refused(name, trained, images, capsys):
    (line,) = refused(capsys, "pretrain", "--data.train", str(images), "--name", name)
    assert line == f"error: name = {name}: is not the name of a folder; give one, or a path with --output"


def test_pretrain_is_refused_before_any_work(trained, images, capsys, tmp_path):
    assert "no such file or folder" in refused(capsys, "pretrain", "--data.train", str(tmp_path / "absent"))[0]
    assert refused(capsys, "pretrain", "--data.train", str(images), "--model.projector.depth", "0") == [
        "error: model.projector.depth = 0: must be an integer from 1 to 5"
    ]
    assert trained == []


def test_batch_that_does_not_divide_over_the_launched_ranks_is_refused(trained, images, capsys, monkeypatch):
    words = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 MASTER_ADDR=localhost MASTER_PORT=29500"
    for word in words.split():
        monkeypatch.setenv(*word.split("="))
    lines = refused(capsys, "pretrain", "--data.train", str(images), "--data.batch_size", "100")
    assert lines == ["error: data.batch_size = 100: does not divide over 8 ranks x 1 accumulation step; use 96 or 104"]
    assert trained == []


def test_fresh_refuses_a_folder_that_holds_a_run(trained, images, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(to_yaml(resolve(overrides={"output": tmp_path / "run"})))
    lines = refused(capsys, "pretrain", "--data.train", str(images), "--output", str(tmp_path / "run"), "--fresh")
    assert "already contains a run; --fresh needs an empty folder" in lines[0]
    assert trained == []


@pytest.mark.parametrize("variable", ["TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"])
def test_a_command_that_is_started_again_must_name_its_folder(trained, images, capsys, monkeypatch, variable):
    for harmless in ("", "0"):
        monkeypatch.setenv(variable, harmless)
        assert cli.main(["pretrain", "--data.train", str(images)]) == 0
    monkeypatch.setenv(variable, "1")
    (line,) = refused(capsys, "pretrain", "--data.train", str(images))
    assert variable in line and "give --output FOLDER" in line


def test_missing_dali_names_the_extras(trained, images, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines = refused(capsys, "pretrain", "--data.train", str(images))
    assert "pip install nvidia-dali-cuda130" in lines[0]
    assert "nvidia-dali-cuda120" in lines[0]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("a = 1: wrong\nb = 2: wrong"), 2, "error: a = 1: wrong\nerror: b = 2: wrong\n"),
        (DataError("x.jpg: truncated"), 2, "error: x.jpg: truncated\n"),
        (RunStopped("10 steps in a row were not finite"), 3, "stopped: 10 steps in a row were not finite\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_status_and_message(error, status, message, images, capsys, monkeypatch):
    def fail(config, **_):
        raise error

    monkeypatch.setattr("unigrad_fast.training.loop.pretrain", fail)
    assert cli.main(["pretrain", "--data.train", str(images), "--output", str(images.parent / "run")]) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "long"),
            2,
            "error: long: File name too long; give another path",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory", b"/a"),
            2,
            "error: /a: Not a directory; give another path",
        ),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", Path("/a")),
            2,
            "error: /a: Is a directory; give another path",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/a"),
            2,
            "error: /a: No such file or directory; give another path",
        ),
        *(
            (
                OSError(errno.EFBIG, "x", name),
                3,
                f"stopped: {path} cannot be written: x; raise the limit on file sizes (`ulimit -f`)",
            )
            for name, path in (("/a", "/a"), (None, "a file"))
        ),
        (OSError(errno.ENOSPC, "x", "/a"), 3, "stopped: /a cannot be written: x; free disk space"),
        (
            OSError(errno.EDQUOT, "x", "/a"),
            3,
            "stopped: /a cannot be written: x; remove files of yours until your quota allows more (`quota -s`)",
        ),
        *(
            (OSError(code, "x", "/a"), 3, "stopped: /a: x; check the disk and the connection to it (`dmesg`)")
            for code in (errno.EIO, errno.EREMOTEIO)
        ),
        *(
            (
                OSError(code, "x", "/a"),
                3,
                "stopped: /a: x; mount its file system again, or check the connection to the storage",
            )
            for code in (errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN)
        ),
    ],
)
def test_failures_of_files_are_one_line(error, status, message, capsys, monkeypatch):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file or directory"),  # nothing that the user could mend
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EBADF, "Bad file descriptor", "/a"),
        OSError("a message alone"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_other_failures_of_the_system_are_not_swallowed(error, monkeypatch):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(OSError) as raised:
        cli.main(["doctor"])
    assert raised.value is error


@pytest.mark.parametrize("output", ["{root}/" + "a" * 300, "/dev/null/x", "{root}/file/x"])
def test_shards_are_refused_where_no_folder_can_be(images, tmp_path, capsys, output):
    Image.new("RGB", (16, 16)).save(images / "a.png")
    (tmp_path / "file").touch()
    (line,) = refused(capsys, "data", "shard", str(images), output.format(root=tmp_path))
    assert output.format(root=tmp_path) in line and line.endswith(("; give another path", " is a file; give a folder"))


def test_bug_is_not_swallowed(images, monkeypatch):
    monkeypatch.setattr("unigrad_fast.training.loop.pretrain", lambda config, **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["pretrain", "--data.train", str(images), "--output", str(images.parent / "run")])


def test_errors_of_other_ranks_name_the_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert refused(capsys, "pretrain", "--seed", "x")[0].startswith("error on rank 3: seed = x: ")


def test_evaluate_knn_calls_the_evaluation(monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    calls = []
    monkeypatch.setattr("unigrad_fast.evaluation.knn_run.evaluate_knn", lambda *given: calls.append(given))
    assert cli.main(["evaluate", "knn", str(tmp_path), "--baselines", "true"]) == 0
    asked = ["--checkpoint", "30", "--k", "5", "--temperature", "0.2", "--data.val", "/v"]
    assert cli.main(["evaluate", "knn", str(tmp_path), *asked]) == 0
    assert calls == [(tmp_path, True, Asked()), (tmp_path, False, Asked(30, None, Path("/v"), 5, 0.2))]


def test_data_synth_calls_the_drawing(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("unigrad_fast.images.drawing.draw", lambda folder, seed: calls.append((folder, seed)) or folder)
    assert cli.main(["data", "synth", str(tmp_path / "a"), "--seed", "3"]) == 0
    assert calls == [(tmp_path / "a", 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrian", "pretrian: unknown command; did you mean pretrain?"),
        ("data recipe", "data recipe: unknown command; did you mean data presets?"),
        (
            "evaluate",
            "evaluate: names a group of commands; type one of evaluate knn RUN, evaluate linear RUN, "
            "evaluate finetune RUN, evaluate features RUN IMAGES, evaluate retrieve RUN IMAGES..., "
            "evaluate confusion RUN, evaluate map RUN IMAGES, evaluate list RUN",
        ),
        (
            "checkpoint --k 3",
            "checkpoint: names a group of commands; type one of checkpoint show PATH, checkpoint verify PATH",
        ),
        ("evaluate kn x", "evaluate kn x: unknown command; did you mean evaluate knn?"),
        ("knn x", "knn x: unknown command; did you mean evaluate knn?"),
        (
            "evaluate frobnicate",
            "evaluate frobnicate: unknown command; type one of evaluate knn RUN, evaluate linear RUN, "
            "evaluate finetune RUN, evaluate features RUN IMAGES, evaluate retrieve RUN IMAGES..., "
            "evaluate confusion RUN, evaluate map RUN IMAGES, evaluate list RUN",
        ),
        ("frobnicate step", f"frobnicate step: unknown command; commands are {', '.join(cli.COMMANDS)}"),
        ("bench step frobnicate", "frobnicate: unexpected argument; options are written --key value"),
        ("bench step --case frobnicate", "case = frobnicate: must be one of resnet50, resnet18, all"),
        ("--frobnicate", f"--frobnicate: unknown command; commands are {', '.join(cli.COMMANDS)}"),
        ("pretrain resnet50", "resnet50: unexpected argument; options are written --key value"),
        ("evaluate knn", "run: missing; give the folder of a run, or --weights FILE --backbone NAME"),
        (
            "evaluate knn a --weights b",
            f"weights = {Path.cwd()}/b: takes the place of run = {Path.cwd()}/a; give one of them",
        ),
        *(
            (
                f"evaluate {command} --weights b --backbone resnet18 a",
                f"weights = {Path.cwd()}/b: takes the place of run = {Path.cwd()}/a; give one of them; images are "
                f"given as --images {Path.cwd()}/a",
            )
            for command in ("features", "map")
        ),
        ("export", "run: missing; folder of the run."),
        ("evaluate knn a b", "b: unexpected argument; options are written --key value"),
        ("evaluate knn a --baseline true", "baseline = true: unknown key; did you mean baselines?"),
        ("data synth a --seed -1", "seed = -1: must be an integer from 0 to 4294967295"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(arguments, message, capsys):
    assert refused(capsys, *arguments.split()) == [f"error: {message}"]


def test_folder_without_a_run_cannot_be_evaluated(capsys, tmp_path):
    assert "no run there" in refused(capsys, "evaluate", "knn", str(tmp_path))[0]


def test_the_packages_that_are_asked_for_are_those_that_are_installed():
    wanted = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    assert set(re.findall(r'"([\w-]+)', wanted)) == set(NEEDED.values())


def test_local_rank_of_the_deepspeed_launcher_is_accepted(capsys):
    assert cli.main(["--local_rank=1", "--version"]) == 0


def test_module_exits_with_the_status_and_no_traceback():
    command = [sys.executable, "-m", "unigrad_fast", "pretrain", "--seed", "x"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: seed = x: must be an integer from 0 to 4294967295\n"


@pytest.mark.parametrize("gone", ["pydantic yaml rich", "torch"])
def test_a_checkout_without_its_dependencies_names_them_in_one_line(gone, tmp_path):
    """In a new interpreter, in which nothing is imported yet."""
    code = f"""
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {gone.split()}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
sys.path[:0] = [{str(ROOT)!r}]
sys.argv[1:] = {["evaluate", "knn", str(tmp_path)] if gone == "torch" else ["doctor"]}
from unigrad_fast.__main__ import main
sys.exit(main())
"""
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and "pip install" in line and str(ROOT) in line
    assert all({"yaml": "pyyaml"}.get(name, name) in line for name in gone.split())


def test_ctrl_c_during_the_imports_is_one_line_and_the_shells_status():
    """In a new interpreter, in which nothing is imported yet."""
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "unigrad_fast.config":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.path[:0] = [{str(ROOT)!r}]
from unigrad_fast.__main__ import main
sys.exit(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
