"""Reading a folder of many images: seconds and memory, cold and cached.

    python -m unigrad_fast.benchmarks.bench_manifest [FILES]

The files, 1.3 million unless told, are hard links to one small JPEG in 1,000 class folders of a temporary folder.
Rows go to results/manifest.jsonl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from unigrad_fast.benchmarks.record import append

CLASSES = 1000
LINKS = 60_000  # to one file; some file systems allow no more
READ = """
import json, resource, sys, time
from unigrad_fast.pipelines import Manifest
start = time.perf_counter()
manifest = Manifest.from_folder(sys.argv[1], cache=sys.argv[2])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"files": len(manifest), "seconds": time.perf_counter() - start, "peak_gib": peak}))
"""


def make(root: Path, files: int) -> None:
    for number in range(files):
        folder = root / f"class{number % CLASSES:04}"
        if number < CLASSES:
            folder.mkdir(parents=True)
        if number % LINKS == 0:
            source = folder / f"{number:07}.jpg"
            Image.new("RGB", (8, 8)).save(source)
        else:
            os.link(source, folder / f"{number:07}.jpg")


def main(files: int = 1_300_000) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "images"), files)
        for what in ("cold", "cached"):
            command = [sys.executable, "-c", READ, f"{folder}/images", f"{folder}/cache"]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"what": what, **json.loads(result.stdout)})
            print(rows[-1])
    print(append("manifest", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
