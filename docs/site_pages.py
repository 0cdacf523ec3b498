"""Hooks of MkDocs: pages from files outside of docs/, links into the repository, and generated tables.

README.md, CONTRIBUTING.md, ...    become pages of the site, see `PAGES`
<!-- all keys: ... -->             in configuration.md becomes the tables of the configuration tree
<!-- all rows: ... -->             in measurements.md becomes the tables of all measured rows
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from configuration_tables import keys_of_every_group
from measured_tables import all_rows
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/ROOFLINE.md": "roofline.md",
    "tests/slow-results.md": "slow-results.md",
}
FILES = {
    "unigrad_fast/cards.json": "cards.json",
    "LICENSE": "LICENSE.txt",
    "examples/own_photographs.ipynb": "own_photographs.ipynb",
}
FOLDERS = {"benchmarks/results": "measurements.md#all-rows"}
GENERATED = {"all keys": keys_of_every_group, "all rows": all_rows}
LINK = re.compile(r"(\]\()([^)\s:]+)(\))")


def on_files(files, config):
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for source, file in FILES.items():
        files.append(File.generated(config, file, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    for name, tables in GENERATED.items():
        # Outside of the site the paragraph after the marker says where the tables are.
        before, marker, after = markdown.partition(f"<!-- {name}: ")
        if marker:
            markdown = before + tables() + after.partition("\n\n")[2]
    source = {site: source for source, site in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: link[1] + site_link(source, link[2]) + link[3], markdown)


def site_link(source: str, link: str) -> str:
    """A link in a file of the repository as the site has it; the build fails for a target that the site lacks."""
    path, mark, anchor = link.partition("#")
    if not path:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target in FOLDERS:
        return FOLDERS[target]
    return (PAGES | FILES).get(target, target.removeprefix("docs/")) + mark + anchor
