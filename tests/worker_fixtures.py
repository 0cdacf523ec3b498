"""Fixture for worker processes; `conftest.py` names this file in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from worker_group import WorkerGroup


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerGroup]]:
    """`workers(size)` is a group of that many gloo ranks, shared by the session's tests."""
    groups: dict[int, WorkerGroup] = {}

    def group(size: int) -> WorkerGroup:
        if size not in groups:
            groups[size] = WorkerGroup(size)
        return groups[size]

    yield group
    for each in groups.values():
        each.close()
