"""The table of all results of an encoder: what is comparable, and what differs."""

from __future__ import annotations

import json

import pytest

from unigrad_fast.evaluation.listing import rows, show
from unigrad_fast.runtime.errors import UserError

OLD = {  # as early versions wrote it
    "protocol": "weighted kNN",
    "branch": "online backbone",
    "step": 20,
    "epoch": 2.0,
    "image_size": 32,
    "k": 20,
    "temperature": 0.1,
    "data": {"train": "/a", "val": "/b"},
    "accuracy": {"raw pixels": 12.0, "trained encoder": 50.125},
}
NEW = OLD | {
    "k": 5,
    "transform": {"resize": 36},
    "seed": 0,
    "versions": {"torch": "2.14"},
    "top5": {"trained encoder": 90.0},
}
LINEAR = {"protocol": "quick", "branch": "online backbone", "epoch": 2.0, "accuracy": 60.0, "top5": None, "l2": 0.001}


def test_a_row_says_in_which_settings_the_results_of_a_protocol_differ():
    made = rows({"linear-quick-epoch2": LINEAR, "knn-epoch2": OLD, "knn-epoch2-2": NEW})
    assert made == [
        ("linear, quick", "2", "60.00", "–", ""),
        ("weighted kNN", "2", "50.12", "–", "k 20"),
        ("weighted kNN", "2", "50.12", "90.00", "k 5"),
    ]


def test_a_result_that_tells_little_hides_no_difference_between_the_others():
    foreign = {"protocol": "weighted kNN", "accuracy": 12.3}
    made = rows({"a": foreign, "b": OLD | {"k": 5}, "c": OLD | {"k": 20}, "d": OLD | {"transform": {"resize": 36}}})
    assert [row[4] for row in made] == ["k –", "k 5", "k 20", "k 20"]


def test_weights_from_different_files_go_by_the_names_of_these():
    first, second = NEW | {"weights": "sha256-1a", "file": "/a/moco.pth"}, NEW | {"weights": "sha256-2b"}
    moved = first | {"file": "/b/same.pth"}
    assert [row[4] for row in rows({"a": first, "b": moved})] == ["", ""]
    assert [row[4] for row in rows({"a": first, "b": second, "c": moved})] == [
        "weights moco.pth (sha256-1a)",
        "weights sha256-2b",
        "weights same.pth (sha256-1a)",
    ]


def test_what_the_results_of_a_protocol_tell_is_compared():
    later = NEW | {"epoch": None, "transform": {"resize": 40}}
    first, second = (row[4] for row in rows({"knn": later, "knn-epoch2": NEW}))
    assert (first, second) == ("transform.resize 40", "transform.resize 36")
    assert [row[1] for row in rows({"knn-epoch2": NEW, "knn": later})] == ["–", "2"]


def test_several_seeds_have_a_deviation_and_what_follows_from_a_setting_is_left_out():
    tuned = {
        "protocol": "fine-tuning, twist",
        "branch": "online backbone",
        "epoch": 2.0,
        "accuracy": 34.0,
        "top5": 80.0,
    }
    tuned |= {"deviation": {"accuracy": 3.567, "top5": None}, "chosen": {"head_lr": 0.2}, "fraction": 0.01}
    other = tuned | {
        "chosen": {"head_lr": 5},
        "fraction": 0.1,
        "sample": "ee4a82588c69a70",
        "branch": "target backbone",
    }
    assert rows({"a": tuned | {"sample": "e7c4c3b88d84bc9"}, "b": other}) == [
        ("fine-tuning, twist", "2", "34.00 ± 3.57", "80.00", "branch online backbone, fraction 0.01, sample e7c4c3b8"),
        ("fine-tuning, twist", "2", "34.00 ± 3.57", "80.00", "branch target backbone, fraction 0.1, sample ee4a8258"),
    ]


def test_results_of_a_run_and_of_a_folder_are_shown_and_other_files_are_not(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "evaluation").mkdir(parents=True)
    with pytest.raises(UserError, match="no results there; give the folder of a run that was evaluated"):
        show(run)
    (run / "knn.json").write_text(json.dumps(OLD))
    (run / "evaluation/knn-epoch2.json").write_text(json.dumps(NEW))
    (run / "evaluation/linear-quick-epoch2.json").write_text(json.dumps(LINEAR))
    (run / "evaluation/notes.json").write_text("{}")
    (run / "evaluation/damaged.json").write_text("{")
    show(run)
    said = capsys.readouterr().out
    assert all(word in said for word in ("weighted kNN", "linear, quick", "50.12", "60.00"))
    assert "notes" not in said and "damaged" not in said
    show(run / "evaluation")
    assert "linear, quick" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"epoch": "12"}, "epoch = 12 is no number"),
        ({"epoch": [1]}, "epoch = [1] is no number"),
        ({"accuracy": "50"}, "accuracy = 50 is no number"),
        ({"accuracy": [1]}, "accuracy = [1] is no number"),
        ({"accuracy": {"trained encoder": "x"}}, "accuracy = x is no number"),
        ({"accuracy": 10**400}, "accuracy = 1000"),
        ({"accuracy": True}, "accuracy = true is no number"),
        ({"top5": {"trained encoder": [1]}}, "top5 = [1] is no number"),
        ({"deviation": 3}, "deviation = 3 has no figures by name"),
        ({"deviation": {"accuracy": "x"}}, "deviation.accuracy = x is no number"),
        ({"protocol": ["knn"]}, 'protocol = ["knn"] is no name'),
    ],
)
def test_a_file_that_is_no_result_is_left_out_in_one_line(tmp_path, capsys, odd, said):
    (tmp_path / "knn-epoch2.json").write_text(json.dumps(NEW))
    (tmp_path / "foreign.json").write_text(json.dumps(NEW | odd))
    show(tmp_path)
    warning, title, *table = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: foreign.json left out: {said}") and title.startswith("results in")
    assert sum("weighted kNN" in line for line in table) == 1
    (tmp_path / "knn-epoch2.json").unlink()
    with pytest.raises(UserError, match="no results there"):
        show(tmp_path)
