"""Start-up with many images: seconds and memory of a manifest, cold and from the cache.

    python -m unigrad_fast.benchmarks.pages.manifest [--files 1300000] [--members 20000] [--folder DIR]
        [--output FOLDER]

Measured are a tar shard with labels, and a tree like ImageNet's: 1,000 class folders of tiny JPEG files with an inode
each (about 4 KB of disk per file). "Cold" means without our cache; the operating system's page cache is not dropped.
Every row is measured in its own process; memory is the peak, including the interpreter's. Rows are appended to
OUTPUT/manifest.jsonl.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from PIL import Image

from unigrad_fast.benchmarks.harness import script
from unigrad_fast.benchmarks.harness.record import OUTPUT, append, make_folder
from unigrad_fast.runtime.errors import UserError

CLASSES = 1000
READ = r"""
import json, re, sys, time
from unigrad_fast.pipelines import Manifest
start = time.perf_counter()
manifest = Manifest.open(sys.argv[1], cache=sys.argv[2])
seconds = time.perf_counter() - start
peak = int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) / 2**20  # ru_maxrss has the parent's
print(json.dumps({"images": len(manifest), "seconds": round(seconds, 3), "peak_gib": round(peak, 3)}))
"""


def tiny() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (8, 8)).save(encoded, "JPEG")
    return encoded.getvalue()


def make_tree(root: Path, files: int) -> None:
    content = tiny()
    for number in range(files):
        name = f"n{number % CLASSES:08}"
        folder = root / name
        if number < CLASSES:
            folder.mkdir(parents=True)
        file = os.open(f"{folder}/{name}_{number // CLASSES}.JPEG", os.O_WRONLY | os.O_CREAT)
        os.write(file, content)
        os.close(file)


def make_shard(path: Path, members: int) -> None:
    content = tiny()
    with tarfile.open(path, "w") as tar:
        for number in range(members):
            for ending, data in ((".jpg", content), (".cls", str(number % CLASSES).encode())):
                info = tarfile.TarInfo(f"n{number % CLASSES:08}/{number:08}{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def measure(what: str, path: Path, cache: Path) -> list[dict]:
    rows = []
    for state in ("cold", "cached", "cached", "cached"):
        command = [sys.executable, "-c", READ, str(path), str(cache)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"what": f"{what}, {state}", **json.loads(result.stdout)})
        print(rows[-1], flush=True)
    return rows


def main(
    files: int = 1_300_000,
    members: int = 20_000,
    folder: Path | None = None,
    output: Path = OUTPUT,
) -> None:
    """Measure, print and append the rows.

    Args:
        files: number of files in the tree.
        members: number of images in the shard.
        folder: folder for temporary files; None uses the system's.
        output: folder of the rows.

    Raises:
        UserError: the files would not fit on the disk; `output` is a file.
    """
    needed, free = files * 4600, shutil.disk_usage(folder or tempfile.gettempdir()).free
    if needed > free:
        raise UserError(f"{files} files take {needed / 1e9:.1f} GB, but {free / 1e9:.1f} are free; use fewer --files")
    make_folder(output)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = Path(name)
        make_shard(made / "shard.tar", members)
        rows = measure("shard", made / "shard.tar", made / "cache")
        make_tree(made / "tree", files)
        rows += measure("tree", made / "tree", made / "cache")
    print(f"rows appended to {append(output, 'manifest', rows)}")


if __name__ == "__main__":
    sys.exit(script.run(main))
