"""When a rank stops, dies, hangs or fails, the others end after their time-out and name it; if all stop, all go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_process import free_port
from forked import start
from worker_group import WorkerGroup

from unigrad_fast.config import Config, Engine
from unigrad_fast.runtime import attendance, process_group
from unigrad_fast.runtime.attendance import attended
from unigrad_fast.runtime.errors import RankLost
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.engine import build_engine
from unigrad_fast.training.optimizers import build_optimizer

HERE = socket.gethostname()
TIMEOUT = timedelta(seconds=3)
AT_STAGE = 3
KILLED_UNSEEN = "is killed, and no collective raises an error"
LISTS = "lists images for long"
STUCK = "waits like all others for what does not end"
ALONE = "works for long without the others, like them"
SUSPENDED = "stops after all others"


def misbehave(how: str) -> None:
    if how.startswith("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(600)
    elif how == "fails":
        raise ValueError("its own\nfault")


def as_if_on_gpus(world: World, how: str) -> World:
    """There an error of a collective ends the process at once."""
    return replace(world, device=torch.device("cuda")) if how == KILLED_UNSEEN else world


def rank_of_three(values: dict[str, str], who: int, how: str, group: bool, said: str) -> None:
    """Works through stages with a collective each, in a group that a library has made or in that of all."""
    os.environ.update(values)
    if how in (STUCK, ALONE):
        attendance.STUCK, attendance.LEAST_STUCK = 1, 0.0
    sys.stderr = open(said, "w")  # noqa: SIM115
    try:
        with process_group.session("cpu") as world, attended(as_if_on_gpus(world, how), TIMEOUT) as at:
            theirs = dist.new_group(range(world.size)) if group else None
            others = [process for process in process_group.gather(os.getpid()) if process != os.getpid()]
            if how == LISTS:
                time.sleep(1.5 * TIMEOUT.total_seconds() if world.rank == who else 0)
                dist.barrier()
            for stage in range(2 * AT_STAGE):
                at(f"stage {stage}", alone=how == ALONE)
                if stage == AT_STAGE and world.rank == who:
                    if how == SUSPENDED:
                        time.sleep(0.3)  # by now the others wait in the collective
                        for other in others:
                            os.kill(other, signal.SIGSTOP)
                    misbehave(how)
                if how == KILLED_UNSEEN and stage == AT_STAGE:
                    time.sleep(600)  # as in a library that waits for the GPU
                if how in (STUCK, ALONE) and stage == AT_STAGE:
                    time.sleep(600 if how == STUCK else 2.5 * TIMEOUT.total_seconds())
                dist.all_reduce(torch.ones(2), group=theirs)
    except RankLost as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
    except ValueError:
        os._exit(1)
    os._exit(0)


def is_stopped(process: BaseProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def begin(folder: Path, who: int, how: str, group: bool = False) -> tuple[list[BaseProcess], list[Path]]:
    """The processes of three ranks, and the files that hold what they say."""
    folder.mkdir()
    shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    files = [folder / f"rank-{rank}" for rank in range(3)]
    ranks = [
        start(rank_of_three, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, who, how, group, str(file))
        for rank, file in enumerate(files)
    ]
    return ranks, files


CASES = {
    (1, "stops"): "no longer answers, last heard from at ",
    (1, "is killed"): "no longer answers, last heard from at ",
    (2, "hangs"): "is still at stage 3, and the others wait for it",
    (1, "fails"): "exited at stage 3: ValueError: its own fault",
    (0, "stops"): "no longer answers",
    (0, "is killed"): "no longer answers",
    (1, "stops", True): "no longer answers, last heard from at ",
    (0, KILLED_UNSEEN): "no longer answers",
    (0, LISTS): "",
    (1, ALONE): "",
    (1, STUCK): "",
    (1, SUSPENDED): "",
    (1, "works"): "",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple, tuple[list[int], list[str]]]:
    """Exit statuses of the other ranks and what they said, by case. All cases at once: most of it is waiting."""
    folder, results = tmp_path_factory.mktemp("ranks"), {}
    begun = {case: begin(folder / str(number), *case) for number, case in enumerate(CASES)}
    suspended, _ = begun[1, SUSPENDED]
    while not all(is_stopped(process) for process in suspended):
        time.sleep(0.05)
    time.sleep(1.5 * TIMEOUT.total_seconds())
    for process in suspended:
        os.kill(process.pid, signal.SIGCONT)
    for case, (ranks, files) in begun.items():
        others = [rank for rank in range(3) if rank != case[0]]
        for rank in others:
            ranks[rank].join(120)
        results[case] = [ranks[rank].exitcode for rank in others], [files[rank].read_text() for rank in others]
        ranks[case[0]].kill()
        ranks[case[0]].join()
    return results


@pytest.mark.parametrize("case", [case for case, said in CASES.items() if said], ids=str)
def test_who_is_awaited_in_vain_is_named_with_its_machine_by_all_others(case, ended):
    statuses, said = ended[case]
    assert statuses == [3, 3], said
    for text in said:
        assert text.removeprefix("stopped: ").startswith(f"rank {case[0]} on {HERE} {CASES[case]}"), said
        assert text.endswith("; the same command resumes from the newest checkpoint\n")


@pytest.mark.parametrize("case", [(1, "works"), (1, ALONE), (1, SUSPENDED)], ids=str)
def test_ranks_that_do_their_work_also_after_all_were_suspended_end_without_a_word(case, ended):
    assert ended[case] == ([0, 0], ["", ""])


def test_ranks_that_all_answer_but_exchange_nothing_end_too(ended):
    statuses, said = ended[1, STUCK]
    assert statuses == [3, 3]
    for text in said:
        assert re.match(r"stopped: all ranks answer, but nothing has been exchanged for \d+ s, at stage 3", text), said


def test_before_the_first_stage_ranks_wait_longer_for_one_that_lists_images(ended):
    assert ended[0, LISTS] == ([0, 0], ["", ""])


def time_outs_of_an_engine() -> tuple[set[float], set[float]]:
    """Seconds that each group allows, once DeepSpeed has made its own."""
    process_group.limit(timedelta(minutes=2))
    encoder = torch.nn.Linear(3, 2)
    build_engine(
        encoder, build_optimizer(encoder, Config().optimizer), settings=Engine(), micro_batch_size=2, dtype=None
    )
    groups = list(dist.distributed_c10d._world.pg_map)
    before = {each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups}
    process_group.limit(timedelta(minutes=1))
    return before, {each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups}


def test_collectives_in_deepspeeds_groups_have_the_same_time_out():
    group = WorkerGroup(1)
    try:
        ((before, after),) = group.run(time_outs_of_an_engine)
    finally:
        group.close()
    assert len(before) > 1 and after == {60.0}
