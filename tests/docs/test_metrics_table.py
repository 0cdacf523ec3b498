"""The table of metrics on the page of the method is what is declared."""

from pages import ROOT

from unigrad_fast.objectives.metrics import METRICS


def test_the_table_of_metrics_is_the_declared_one():
    text = (ROOT / "docs/method.md").read_text(encoding="utf-8")
    section = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    assert rows == [
        [f"`{name}`", metric.meaning, metric.owners, metric.place if " " in metric.place else f"`{metric.place}`"]
        for name, metric in METRICS.items()
    ]
