"""Time in which the process did not run counts neither for files that are being read nor for anything else."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forked import start
from hypothesis import given
from hypothesis import strategies as st

from unigrad_fast.pipelines import clock
from unigrad_fast.pipelines.errors import DataError
from unigrad_fast.pipelines.reading.damage import Damaged
from unigrad_fast.pipelines.reading.source import Source
from unigrad_fast.pipelines.reading.timed import TimedReader
from unigrad_fast.pipelines.storage import Storage

TIMEOUT = 1.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, clock.BEAT), st.floats(clock.GAP + 0.01, 1e4))))
def test_what_is_waited_for_begins_anew_after_each_gap(looks):
    moment, waited = 100.0, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: moment)
        began = clock.now()
        for suspended, beat, gap in looks:
            moment, waited = moment + (gap if suspended else beat), 0.0 if suspended else waited + beat
            assert clock.since(began) == pytest.approx(waited, abs=1e-6)
    clock._looked = clock._resumed = float("-inf")


class Files:
    """Four images, in place of a manifest; each answers once a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sizes, self.storage = folder, np.ones((4, 2), np.int32), Storage()

    def __len__(self) -> int:
        return 4

    def path(self, image: int) -> str:
        return str(image)

    def read(self, image: int) -> bytes:
        (self.folder / f"begun-{threading.get_ident()}").touch()
        while not (self.folder / "answer").exists():
            time.sleep(0.01)
        return bytes([image])


def read(folder: Path) -> None:
    """Reads the images in both ways at once, and writes down what became of them."""
    files, results = Files(folder), []
    single = threading.Thread(target=lambda: results.append(TimedReader(files, TIMEOUT).read(2)))
    single.start()
    step = {"last": None, "ahead": 0, "timeout": TIMEOUT, "seed": 0, "known": {}, "damaged": Damaged(files)}
    try:
        supply = Source(files, lambda step: (0, np.arange(2)), threads=2, **step).take(0)
        results.append((supply.index.tolist(), supply.failures))
    except DataError as error:
        results.append(error)
    single.join()
    (folder / "results").write_text(repr(sorted(results, key=str)))


def test_images_that_were_being_read_while_the_process_was_suspended_are_not_given_up(tmp_path):
    process = start(read, tmp_path)
    while len(list(tmp_path.glob("begun-*"))) < 3:
        assert process.exitcode is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5 * TIMEOUT)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.2 * TIMEOUT)  # those that wait look at the clock
    (tmp_path / "answer").touch()
    process.join(60)
    assert (tmp_path / "results").read_text() == repr([([0, 1], []), b"\x02"])
