"""Two machines for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_hosts import Host, Unavailable, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except Unavailable as reason:
        pytest.skip(f"no machines of our own here: {reason}")
