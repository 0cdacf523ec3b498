"""A worker of a scan: decodes each image of a task once, and returns their rows."""

import hashlib
import signal
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from ..errors import DataError
from ..files.headers import reason
from ..manifest import Manifest
from ..reading.timed import TimedReader
from .decoder import Decoder
from .defects import find_defect
from .files import BAD, COLUMNS, as_csv, name_of


def work(manifest: Manifest, connection: Connection, inherited: list[Connection], image: Any, timeout: float) -> None:
    """Main function of a worker: takes tasks and returns rows until its connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    for other in inherited:
        other.close()  # so that each worker ends when the scan is killed
    try:
        decoder, reader = Decoder(), TimedReader(manifest, timeout)
        warnings.simplefilter("ignore")
        while True:
            try:
                (first, end), crashing = connection.recv()
            except EOFError:
                return
            rows = []
            for image.value in range(first, end):
                rows.append(_row(reader, image.value, decoder, crashing.get(image.value)))
            image.value = -1
            connection.send((as_csv(rows), len(rows), sum(row[-1].startswith(BAD) for row in rows)))
    except BrokenPipeError:
        return
    except DataError as error:
        connection.send(error)
    except Exception:
        connection.send(traceback.format_exc())


def _row(reader: TimedReader, index: int, decoder: Decoder, crash: str | None) -> list[Any]:
    facts, manifest = dict.fromkeys(COLUMNS, ""), reader.manifest
    facts["path"] = name_of(manifest, index)
    if manifest.labels is not None:
        facts["label"] = manifest.classes[manifest.labels[index]]
    try:
        data = reader.read(index)
    except FileNotFoundError:
        facts["note"] = f"{BAD}missing"
    except OSError as error:
        facts["note"] = f"{BAD}cannot be read ({reason(error)})"
    else:
        facts |= {"bytes": len(data), "digest": hashlib.blake2b(data, digest_size=8).hexdigest()}
        defect = crash or find_defect(data, facts, decoder)
        if defect:
            facts["note"] = BAD + defect
    return list(facts.values())
