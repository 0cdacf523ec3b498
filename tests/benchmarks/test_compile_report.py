"""The report on compiled kernels goes where it is told to; what it finds is tested in tests/kernels."""

import csv

from unigrad_fast import cli
from unigrad_fast.benchmarks.counts import compiled as compile_report


def test_the_lines_are_written_into_the_output_folder(tmp_path, monkeypatch, capsys):
    case = compile_report.Case("update", "no copy", 90, "bf16", 128, 1024)
    row = compile_report.Row(case, "update_correlation", "ROWS=64", 4, 3, 100, 0, 1024, {}, {})
    monkeypatch.setattr(compile_report, "compile_all", lambda cases, console: [row])
    output = tmp_path / "new"
    assert cli.main(["bench", "kernels", "--compile_only", "true", "--output", str(output)]) == 0
    with (output / "compile_report.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["kernel"], line["architecture"], line["registers"]) == ("update", "90", "100")
    assert f"1 lines in {output}" in capsys.readouterr().out.replace("\n", "")
