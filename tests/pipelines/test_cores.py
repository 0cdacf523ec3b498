"""The cores that a process may use: its affinity, and what control groups of either version grant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unigrad_fast.pipelines import cores


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content + "\n")


def test_the_smallest_quota_along_the_groups_counts(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job/step\n")
    root = tmp_path / "fs"
    assert cores.quota(proc, root) is None  # not mounted
    write(root / "job" / "step", cpu__max="max 100000")
    assert cores.quota(proc, root) is None
    write(root / "job", cpu__max="350000 100000")
    assert cores.quota(proc, root) == 3.5
    write(root, cpu__max="150000 100000")  # as a container sees its own group, whatever the path says
    assert cores.quota(proc, root) == 1.5


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_first_version_of_control_groups_is_read_too(tmp_path, mount):
    proc = tmp_path / "cgroup"
    proc.write_text("3:cpuset:/\n2:cpu,cpuacct:/docker/1\n")
    write(tmp_path / mount / "docker" / "1", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cores.quota(proc, tmp_path) is None
    write(tmp_path / mount, cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert cores.quota(proc, tmp_path) == 2


def test_what_the_group_of_the_smallest_quota_used_is_read_in_either_version(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job/step\n")
    assert cores.seconds_of_group(proc, tmp_path) is None
    write(tmp_path / "job" / "step", cpu__max="max 100000", cpu__stat="usage_usec 9000000\nuser_usec 1")
    assert cores.seconds_of_group(proc, tmp_path) is None  # it limits nothing
    write(tmp_path / "job", cpu__max="150000 100000", cpu__stat="usage_usec 2500000\nuser_usec 1")
    assert cores.seconds_of_group(proc, tmp_path) == 2.5
    proc.write_text("2:cpu,cpuacct:/\n")
    first = tmp_path / "cpu,cpuacct"
    write(first, cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000", cpu__stat="nr_periods 3")
    assert cores.seconds_of_group(proc, tmp_path) is None
    write(first, cpuacct__usage="1500000000")
    assert cores.seconds_of_group(proc, tmp_path) == 1.5


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"nothing\n", b"0::/x\n"])
def test_what_is_no_group_limits_nothing(tmp_path, content):
    (tmp_path / "cgroup").write_bytes(content)
    write(tmp_path / "x", cpu__max="many")
    assert cores.quota(tmp_path / "cgroup", tmp_path) is None


@pytest.mark.parametrize(
    ("machine", "allowed", "granted", "processes", "usable"),
    [(64, 64, None, 1, 64), (64, 64, 3.5, 1, 3), (64, 4, 8.0, 1, 4), (64, 64, 8.0, 4, 2), (64, 64, 0.5, 1, 1)],
)
def test_affinity_and_quota_limit_the_cores(monkeypatch, machine, allowed, granted, processes, usable):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(cores, "quota", lambda: granted)
    assert cores.usable_cores(processes) == usable
