"""One call of `unigrad-fast compare`: its members are checked against the folder, then trained, listed or judged."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unigrad_fast.benchmarks.harness.processes import require_one_process
from unigrad_fast.comparison import running, tables
from unigrad_fast.comparison.figures import Row, ended
from unigrad_fast.comparison.folder import STATUS, ComparisonFolder
from unigrad_fast.comparison.members import Asked, Member, some, written
from unigrad_fast.comparison.paper_values import TABLES, PaperTable
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.console import new_console
from unigrad_fast.runtime.errors import DataError, RunStopped, UserError
from unigrad_fast.runtime.files import write_whole
from unigrad_fast.runtime.outputs import require_file, require_free
from unigrad_fast.runtime.processors import compute_threads
from unigrad_fast.runtime.shell import own, typed
from unigrad_fast.runtime.wording import count
from unigrad_fast.training.same_run import contradictions, require_same_run

Kept = Callable[[Mapping[str, Any]], dict[str, Any]]


def recorded(folder: Path) -> dict[str, Any] | None:
    """The options of the comparison in a folder; None if there is none."""
    return ComparisonFolder(folder).read()


@dataclass
class Session:
    """Args:
    where: the folder.
    asked: what is compared.
    members: its members.
    jobs: how many are trained side by side.
    """

    where: Path
    asked: Asked
    members: Sequence[Member]
    jobs: int

    def __post_init__(self) -> None:
        self.folder = ComparisonFolder(self.where)
        self.console = new_console()
        self.ended = partial(ended, folder=self.folder)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def require_same(self, earlier: Sequence[Member] | None) -> None:
        """Raises UserError where the folder holds another comparison, or a member another run.

        A comparison may get more members: other seeds, methods, values.

        Args:
            earlier: the members of the folder's comparison.
        """
        require_one_process("compare", "starts a process for each member")
        data = self.members[0].config.data
        self.folder.require({"data.train": data.train, "data.val": data.val})
        now = {member.name: member for member in self.members}
        if lacking := [member.name for member in earlier or () if member.name not in now]:
            raise UserError(
                f"folder = {self.where}: its comparison has {some(lacking)}, which this one lacks; add what is "
                "missing, or give another folder"
            )
        whose, problems = f"the comparison in {self.where}", dict[str, None]()
        for before in earlier or ():
            saved = before.config.model_dump(mode="json")
            config = now[before.name].config
            problems |= dict.fromkeys(contradictions(config, saved, whose))
            for key in ("train", "val"):
                here, there = getattr(config.data, key), getattr(before.config.data, key)
                if here != there:
                    remedy = f"if these are the same images, correct {self.folder.asked}"
                    problems[f"data.{key} = {here}: {whose} has {there}; {remedy}"] = None
        if problems:
            raise UserError("\n".join([*problems, "to compare anew, give another folder"]))
        for member in self.members:
            require_same_run(member.config)

    def train(self, kept: Kept, before: Mapping[str, Any] | None) -> None:
        """Train what is not done, and write the tables.

        Raises:
            UserError: another process compares in the folder.
            RunStopped: a member failed; the others were trained.
        """
        with self.folder.occupied():
            places = self._places()
            common = written(self.asked.common or {}, self.members[0].config)
            if not torch.cuda.is_available() or self.members[0].config.engine.device == "cpu":
                common |= self._threads(common, before)
            self.folder.write(kept(common))
            threads = common.get("engine.threads")
            extra = () if threads is None else ("--engine.threads", str(threads))
            self.say(f"{count(len(self.members), 'member')}, {self.jobs} at a time, in {self.where}")
            running.Runner(self.members, self.folder, places, extra, self.ended, self.write_files, self.console).run()
        self.write_tables()
        every = [(member.name, self.ended(member)) for member in self.members]
        if failed := [name for name, at in every if at.failure is not None or not at.done]:
            raise RunStopped(
                f"{len(failed)} of {count(len(every), 'member')} failed: {some(failed)}; the same command tries again"
            )

    def _places(self) -> list[dict[str, str]]:
        """Variables for each job: on GPUs, which one it has."""
        if not torch.cuda.is_available() or self.members[0].config.engine.device == "cpu":
            return [{}] * self.jobs
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = named.split(",")
        if self.jobs > len(gpus):
            raise UserError(f"jobs = {self.jobs}: this machine has {count(len(gpus), 'GPU')}; give at most {len(gpus)}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: self.jobs]]

    def _threads(self, common: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, int]:
        """The compute threads of all members, which decide rounding: as given, as the comparison began, or that fit."""
        key = "engine.threads"
        if common.get(key) is not None or key in (self.asked.sweep or {}):
            return {}
        if (kept := (before or {}).get(key)) is not None:
            return {key: kept}
        with compute_threads(torch.device("cpu"), key=key) as threads:
            if threads.said is not None and self.jobs == 1:
                self.say(threads.said)
            return {key: max(1, torch.get_num_threads() // self.jobs)}

    def rows(self) -> list[Row]:
        """Every line with its members; lines with the same keys share them."""
        by_setting: dict[tuple, dict[int, Member]] = {}
        for member in self.members:
            by_setting.setdefault(member.line.setting, {})[member.seed] = member
        found = []
        for line in self.asked.lines():
            own_members = by_setting[line.setting] if line.keys is not None else {}
            runs = {seed: member.config.output for seed, member in own_members.items()}
            found.append(Row(line, runs, {seed: self.ended(member) for seed, member in own_members.items()}))
        return found

    def compared(self) -> tables.Comparison:
        """What has ended so far."""
        paper = TABLES[self.asked.table] if self.asked.table is not None else None
        return tables.Comparison(self._title(paper), self.rows(), paper)

    def write_files(self) -> dict[str, bytes]:
        """Write the tables, of what has ended so far."""
        contents = tables.contents(self.compared())
        for kind, path in self.folder.tables.items():
            write_whole(path, contents[kind])
        return contents

    def _title(self, paper: PaperTable | None) -> str:
        """What is compared, and what all members have in common of what matters most."""
        configs = [member.config for member in self.members]
        recipe = (self.asked.common or {}).get("recipe")
        epochs = {count(config.schedule.epochs, "epoch") for config in configs}
        images = {f"images of {config.data.train}" for config in configs}
        shared = [
            *([f"recipe {recipe}"] if recipe else []),
            *(each.pop() for each in (epochs, images) if len(each) == 1),
        ]
        return ", ".join([self.where.name if paper is None else paper.title, *shared])

    def write_tables(self) -> None:
        """Write and show the tables, and draw the pictures."""
        self.say(self.write_files()["md"].decode())
        self.say(f"written: {', '.join(map(str, [*self.folder.tables.values(), *self.draw()]))}")

    def draw(self) -> list[Path]:
        """Draw the pictures; an error costs only them."""
        try:
            from unigrad_fast.comparison import pictures

            return pictures.draw(self.compared(), self.folder.pictures, self._validation_images())
        except Exception as error:
            self.say(f"WARNING: pictures are missing ({' '.join(f'{type(error).__name__}: {error}'.split())})")
            return []

    def _validation_images(self) -> int | None:
        """Their number, if all members have the same and they are still there."""
        (first, *others) = {member.config.data.val for member in self.members}
        with suppress(DataError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None if others or first is None else len(Manifest.open(first))
        return None

    def show_plan(self) -> None:
        """List the members with their commands, and the time of each by three measured steps."""
        from unigrad_fast.comparison import timing

        seconds = {}
        for member in self.members:
            self.say(f"{member.name}: {'done' if self.ended(member).done else own(*member.words)}")
        for line, member in {member.line.name: member for member in self.members}.items():
            seconds[line] = timing.seconds(member.config)
            self.say(f"{line}: {timing.spoken(seconds[line])} per member")
        total = sum(seconds[member.line.name] for member in self.members if not self.ended(member).done)
        self.say(f"{count(len(self.members), 'member')}: {timing.spoken(total)} one after another; {timing.WITHOUT}")

    def write_script(self, path: Path, kept: Kept) -> None:
        """Write a script for sbatch, an array with an index for each member."""
        require_file(path)
        content = script(self.members, self.folder)
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            require_free([path], overwrite=False)
        with self.folder.occupied():
            self.folder.write(kept(written(self.asked.common or {}, self.members[0].config)))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.encode())
        self.say(f"written: {path}, an array of {count(len(self.members), 'member')}")
        self.say(f"  {typed('sbatch', path)}    # with your site's options: --partition, --gpus=1, --time")
        self.say(f"  {own('compare', self.where, '--tables_only', 'true')}    # when it has ended, or before")


def script(members: Sequence[Member], folder: ComparisonFolder) -> str:
    """A script for sbatch; each index of the array is a member, in the order of the list."""
    cases = "\n".join(
        f"    {number}) log={typed(folder.log(member))}; command=({own(*member.words)}) ;;"
        for number, member in enumerate(members)
    )
    return f"""#!/bin/bash
#SBATCH --job-name=compare
#SBATCH --ntasks=1
#SBATCH --array=0-{len(members) - 1}
#SBATCH --output=/dev/null
#SBATCH --signal=B:TERM@120
# SLURM's output goes to a log of each member. Two minutes before the time limit a member is asked to save; submit the
# script again to continue what has not ended.
cd {typed(Path.cwd())} || exit 1
case "$SLURM_ARRAY_TASK_ID" in
{cases}
    *) echo "no member has the index $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;
esac
"${{command[@]}}" > "$log" 2>&1 &
trap 'kill -TERM $!' TERM
wait $!; status=$?
while kill -0 $! 2> /dev/null; do wait $!; status=$?; done    # a signal ends the first wait
printf '\\n{STATUS} %d\\n' "$status" >> "$log"
exit "$status"
"""
