"""Launchers, the process group, the worker pool of the tests, and the quiet import of DeepSpeed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from command_process import free_port
from forked import start
from hypothesis import given
from hypothesis import strategies as st
from worker_group import WorkerError, WorkerGroup

from unigrad_fast.runtime import process_group, rendezvous
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import Launch, expand_hosts, launch_environment

ROOT = Path(__file__).resolve().parents[2]

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize("environment", [{"PATH": "/bin"}, {"WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_without_a_launcher_there_is_one_process(environment):
    assert launch_environment(environment) == Launch("single")


def test_torchrun_is_recognised():
    assert launch_environment(TORCHRUN) == Launch("torchrun", 5, 8, 1, 4, "node0", 29500)


def test_deepspeed_is_recognised():
    assert launch_environment(DEEPSPEED) == Launch("deepspeed", 1, 2, 1, 2, "127.0.0.1", 29500)


def test_launcher_of_one_process_needs_no_address():
    assert launch_environment({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_slurm_is_recognised():
    launch = launch_environment(SLURM)
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank) == ("slurm", 3, 5, 0)
    assert (launch.local_size, launch.address) == (2, "gpu07")


def test_all_tasks_of_a_slurm_step_find_the_same_port_and_another_job_another():
    ports = {launch_environment(SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(5)}
    other = launch_environment(SLURM | {"SLURM_JOB_ID": "4243"}).port
    assert len(ports) == 1 and other not in ports and 1024 < ports.pop() < 32768


def test_master_variables_override_what_slurm_says():
    launch = launch_environment(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (launch.address, launch.port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_batch_script_without_srun_is_one_process(missing):
    assert launch_environment({k: v for k, v in SLURM.items() if k != missing}).launcher == "single"


def test_interactive_step_of_one_task_is_one_process():
    assert launch_environment(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}).launcher == "single"


def test_torchrun_inside_slurm_is_torchrun():
    assert launch_environment(SLURM | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environment", "change", "named"),
    [
        (TORCHRUN, {"RANK": None}, "RANK is not set"),
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "RANK is 5"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE is 16"),
        (TORCHRUN, {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT is not set"),
        (TORCHRUN, {"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (TORCHRUN, {"RANK": "8"}, "RANK is 8, but WORLD_SIZE allows only 0 to 7"),
        (TORCHRUN, {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE allows only 0 to 3"),
        (DEEPSPEED, {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_SIZE allows only 0 to 1"),
        (SLURM, {"SLURM_PROCID": "5"}, "SLURM_PROCID is 5, but SLURM_NTASKS"),
        (SLURM, {"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2, but SLURM_STEP_TASKS_PER_NODE"),
        (SLURM, {"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        (SLURM, {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "a"}, "SLURM_STEP_TASKS_PER_NODE is 'a'"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": None}, "SLURM_NTASKS_PER_NODE is not set"),
        (SLURM, {"SLURM_JOB_NODELIST": "gpu[1-"}, "SLURM_JOB_NODELIST: 'gpu"),
        (SLURM, {"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not set"),
        (SLURM, {"SLURM_JOB_ID": None}, "SLURM_JOB_ID is not set"),
    ],
)
def test_inconsistent_environment_names_the_variable(environment, change, named):
    environment = {k: v for k, v in (environment | change).items() if v is not None}
    with pytest.raises(UserError) as error:
        launch_environment(environment)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[8-11],cpu2", ["gpu8", "gpu9", "gpu10", "gpu11", "cpu2"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("node-1.example.org", ["node-1.example.org"]),
    ],
)
def test_host_lists_expand(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "gpu[", "gpu[1-", "gpu]1", "gpu[a-b]", "gpu[]", "gpu[3-1]", ","])
def test_malformed_host_lists_are_refused(nodelist):
    with pytest.raises(ValueError, match="not a list"):
        expand_hosts(nodelist)


@given(st.integers(0, 500), st.integers(0, 40), st.integers(1, 4))
def test_ranges_keep_their_zeros_and_length(first, more, width):
    numbers = [f"{number:0{width}d}" for number in range(first, first + more + 1)]
    assert expand_hosts(f"n[{numbers[0]}-{numbers[-1]}]") == [f"n{number}" for number in numbers]


def test_single_process_has_a_group_and_leaves_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchdevice0")  # as of a cluster's profile
    before = dict(os.environ)
    with process_group.session("cpu") as world:
        assert (world.rank, world.size, world.backend) == (0, 1, "gloo")
        assert world.device == torch.device("cpu")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
        assert os.environ["LOCAL_RANK"] == "0"
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_a_variable_that_torch_does_not_understand_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "nonsense")  # torch reads it for its first group only
    refuse = mock.Mock(side_effect=RuntimeError("makeDeviceForHostname(): unsupported gloo device"))
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(UserError, match=r"unsupported gloo device; change or unset GLOO_DEVICE_TRANSPORT$"):
        process_group.start("cpu")


def test_processes_that_do_not_come_are_a_users_error(monkeypatch):
    with socket.socket() as taken:  # a port where nobody answers, for rank 1
        taken.bind(("127.0.0.1", 0))
        values = DEEPSPEED | {"MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(process_group, "RENDEZVOUS_TIMEOUT", timedelta(milliseconds=500))
        with pytest.raises(UserError, match=r"rank 1 of 2 could not connect to the others at 127\.0\.0\.1:\d+ within"):
            process_group.start("cpu")
    assert os.environ["LOCAL_RANK"] == "1" and not dist.is_initialized()


def start_late(values: dict[str, str], after: str | None, patience: float, said: str) -> None:
    """A rank that comes once another has spoken, and is impatient with those that are not there yet."""
    os.environ.update(values)
    while after and not (os.path.exists(after) and os.path.getsize(after)):
        time.sleep(0.02)
    sys.stderr = open(said, "w")  # noqa: SIM115
    rendezvous.NOTICE_SECONDS, rendezvous.STRANGER_SECONDS = 0.5, 3.0
    process_group.RENDEZVOUS_TIMEOUT = timedelta(seconds=patience)
    try:
        process_group.start("cpu")
    except UserError as error:
        print(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


def what_ranks_say(
    tmp_path: Path, ranks: list[int], size: int, after: dict[int, int] | None = None, patience: float = 30, **more: str
) -> list[list[str]]:
    """What each of these ranks says, of which some come only after another has spoken."""
    port = more.get("MASTER_PORT", str(free_port()))
    files = [tmp_path / f"rank-{rank}" for rank in range(size)]
    processes = []
    for rank in ranks:
        values = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        values |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", **more}
        before = str(files[after[rank]]) if after and rank in after else None
        processes.append(start(start_late, values, before, patience, str(files[rank])))
    for process in processes:
        process.join(60)
    texts = [file.read_text().splitlines() if file.exists() else [] for file in files]
    return [[line for line in text if not line.startswith("[")] for text in texts]  # torch's own begin so


def test_who_is_awaited_is_said(tmp_path):
    first, second, _ = what_ranks_say(tmp_path, [0, 1, 2], 3, after={0: 1, 2: 0})
    assert second[0].startswith("rank 1 of 3 waits for rank 0 at 127.0.0.1:")
    # Rank 1 may be slow to see that rank 0 has come.
    assert len(first) == 1 and re.match(r"rank 0 of 3 waits for (rank|ranks 1,) 2 at 127\.0\.0\.1:\d+$", first[0])


@pytest.mark.parametrize(
    "here, speaks, awaited",
    [([0, 1], 0, "rank 2"), ([0], 0, "ranks 1, 2"), ([1], 1, "ranks 0, 2"), ([0, 1], 1, None), ([0, 1, 2], 2, None)],
)
def test_one_rank_names_exactly_those_that_are_missing(here, speaks, awaited, monkeypatch, capsys):
    store = dist.HashStore()
    for rank in set(here) - {speaks}:
        store.set(f"here/{rank}", "")
    store.set("number", str(len(here) - 1))
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.0)
    everyone = pytest.raises(RuntimeError, match="did not connect") if len(here) < 3 else nullcontext()
    with everyone:
        rendezvous._gather(store, speaks, 3, "node:1", time.monotonic(), timedelta(seconds=0.05))
    said = capsys.readouterr().err
    assert said == (f"rank {speaks} of 3 waits for {awaited} at node:1\n" if awaited else "")


def test_who_did_not_come_is_named(tmp_path):
    first, _, third = what_ranks_say(tmp_path, [0, 2], 3, patience=4)
    # A slow rank 2 may be among the missing itself, and may find, when its time is up, that rank 0 has gone before.
    assert re.match(r"rank 0 of 3 waits for (rank 1|ranks 1, 2) at ", first[0])
    causes = {
        0: ("rank 1 did not connect", "ranks 1, 2 did not connect"),
        2: ("rank 1 did not connect", "rank 0 has exited; its own message says why"),
    }
    for rank, (line, remedy) in ((0, first[1:]), (2, third[-2:])):
        assert line.startswith(f"rank {rank} of 3 could not connect to the others at 127.0.0.1:")
        assert line.partition(" within 4 s: ")[2] in causes[rank] and "all 3 processes were started" in remedy


def test_an_address_without_a_meaning_is_said_at_once(tmp_path):
    first, second = what_ranks_say(tmp_path, [1], 2, patience=3, MASTER_ADDR="nowhere.invalid")
    assert first == [] and second[0].startswith("rank 1 of 2: MASTER_ADDR nowhere.invalid cannot be resolved")
    assert "rank 1 of 2 waits for rank 0 at nowhere.invalid:" in second[1]


def test_a_port_of_another_program_ends_all_ranks_with_the_remedy(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, second = what_ranks_say(tmp_path, [0, 1], 2, patience=60, MASTER_PORT=str(port))
    assert first[0].startswith(f"MASTER_PORT = {port}: another program on ") and "set it to a free one" in first[0]
    assert second[-1].startswith(f"what listens at 127.0.0.1:{port} is not rank 0; set MASTER_PORT to a free port")


def test_a_network_device_that_is_not_there_is_named_by_all_ranks(tmp_path):
    for said in what_ranks_say(tmp_path, [0, 1], 2, GLOO_SOCKET_IFNAME="nosuchdevice0"):
        assert said[-1].startswith(
            f"{socket.gethostname()}: GLOO_SOCKET_IFNAME = nosuchdevice0: no such network device"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_users_error():
    with pytest.raises(UserError, match="torch sees no GPU"):
        process_group.start("cuda")


# What the launched processes run: all meet, add up their ranks, and say who they are.
PROGRAM = """
import json, torch, torch.distributed as dist
from unigrad_fast.runtime.process_group import session
torch.set_num_threads(1)
with session("cpu") as world:
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    told = [world.rank, world.size, world.local_rank, world.local_size, total.item()]
    print("\\n" + json.dumps(told), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return str(file)


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_")) and k not in TORCHRUN}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "always"} | more


def said(output: str) -> list[list]:
    return sorted(json.loads(line) for line in output.splitlines() if re.match(r"\[\d+, ", line))


TWO_RANKS = [[0, 2, 0, 2, 3.0], [1, 2, 1, 2, 3.0]]


@pytest.mark.slow  # what it sets is tried above, and ranks meet under Slurm's variables below
def test_deepspeed_launcher_starts_two_ranks(program):
    port = str(free_port())
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", port, program]
    environment = clean_environment(DS_ACCELERATOR="cpu")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert said(result.stdout) == TWO_RANKS


def test_slurm_starts_two_ranks_without_warnings(program):
    common = SLURM | {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    common["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, program],
            env=clean_environment(**common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert said("".join(output for output, _ in outputs)) == TWO_RANKS
    assert "warning" not in "".join(errors for _, errors in outputs).lower(), outputs


ENGINE = """
import sys, torch
from unigrad_fast.runtime.process_group import session
from unigrad_fast.runtime.quiet import quiet_deepspeed
torch.set_num_threads(1)
for verbose in (False, False, True):
    if verbose:
        print("verbose", flush=True)
        print("verbose", file=sys.stderr, flush=True)
    with session("cpu"):
        deepspeed = quiet_deepspeed(verbose)
        model = torch.nn.Linear(3, 2)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}},
        )
        engine.backward(engine(torch.ones(4, 3)).sum())
        engine.step()
"""


def test_engine_starts_without_a_compiler_twice_and_silently_and_a_verbose_one_talks():
    environment = clean_environment() | {"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}
    environment.pop("DS_ACCELERATOR", None)
    environment.pop("PYTHONWARNINGS")
    command = [sys.executable, "-c", ENGINE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    printed, logged = (stream.split("verbose\n", 1) for stream in (result.stdout, result.stderr))
    assert (printed[0], logged[0]) == ("", "")
    assert "DeepSpeed Final Optimizer = SGD" in printed[1]


AS_WITH_A_GPU = """
import torch, torch.utils.cpp_extension
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.utils.cpp_extension.CUDA_HOME = None
from unigrad_fast.runtime.quiet import quiet_deepspeed
deepspeed = quiet_deepspeed()
assert deepspeed.accelerator.get_accelerator().device_name() == "cuda"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo")
"""


def test_deepspeed_starts_silently_beside_a_gpu_without_nvcc():
    """Asked which of its kernels could be compiled, it would print a line for each."""
    environment = clean_environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-W", "ignore", "-c", AS_WITH_A_GPU]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "compat" not in result.stderr


def rank_and_pid(offset: int) -> tuple[int, int]:
    return dist.get_rank() + offset, os.getpid()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("one has had enough")


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def wait_for_rank_one() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def done_on_first(fails: bool) -> str:
    def work() -> str:
        if fails:
            raise UserError(f"rank {dist.get_rank()} cannot")
        return f"done by rank {dist.get_rank()}"

    try:
        return process_group.on_first(work)
    except UserError as error:
        return str(error)


def test_what_the_first_rank_does_all_ranks_have_and_its_error_all_raise(workers):
    assert workers(2).run(done_on_first, False) == ["done by rank 0"] * 2
    assert workers(2).run(done_on_first, True) == ["rank 0 cannot"] * 2
    assert process_group.on_first(lambda: 7) == 7


def test_workers_answer_by_rank_and_are_reused(workers):
    first, second = workers(2).run(rank_and_pid, 10), workers(2).run(rank_and_pid, 10)
    assert [rank for rank, _ in first] == [10, 11]
    assert first == second


def test_failure_in_a_worker_shows_its_traceback_and_leaves_a_working_group(workers):
    with pytest.raises(WorkerError, match=r"(?s)on rank 1 of 2:.*in fail_on_rank_one.*had enough"):
        workers(2).run(fail_on_rank_one)
    assert [rank for rank, _ in workers(2).run(rank_and_pid, 0)] == [0, 1]


def test_worker_that_dies_or_hangs_is_reported_and_replaced():
    group = WorkerGroup(2)
    try:
        with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2:.*died, exit 7"):
            group.run(die_on_rank_one)
        group.run(rank_and_pid, 0)
        group.timeout = 0.5
        with pytest.raises(WorkerError, match=r"(?s)rank 0 of 2:.*no answer within 0\.5 s"):
            group.run(wait_for_rank_one)
    finally:
        group.close()


def test_a_session_beside_another_one_is_refused_and_changes_nothing():
    with process_group.session("cpu"):
        before = dict(os.environ)
        refused = pytest.raises(UserError, match="another call in this process trains or evaluates already")
        with refused, process_group.session("cpu"):
            pass
        assert dist.is_initialized() and os.environ == before
    with process_group.session("cpu"):
        assert dist.is_initialized()
