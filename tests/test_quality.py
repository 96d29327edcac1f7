"""benchmarks/quality.py without training: what is due, what is kept, and what is drawn."""

import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def quality():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "quality.py")))
    finally:
        sys.path.remove(str(BENCHMARKS))


def loss_of(trial):
    """Best at lr 8e-3 and outer lr 0.7."""
    outer = 0.0 if "lr=" not in trial.sync else 0.1
    return 2.0 + abs(math.log2(trial.lr / 8e-3)) + outer + trial.seed / 100


def found(trial):
    return {"held_out_loss": loss_of(trial), "num_parameters": 9, "curve": [[trial.num_steps, 3.0, loss_of(trial)]]}


def test_the_grid_comes_first_and_then_the_other_seeds_of_its_best(quality, tmp_path):
    entry = quality.entry_of("diloco:H=30@2", task="gpt", is_quick=False)
    results = quality.Results(tmp_path / "results.json")
    first = entry.due(results)
    assert len(first) == 9
    assert {trial.num_hosts for trial in first} == {2}
    for trial in first:
        results.add(trial, found(trial))
    second = entry.due(results)
    assert [(trial.sync, trial.lr, trial.seed) for trial in second] == [
        ("diloco:H=30", 8e-3, 1),
        ("diloco:H=30", 8e-3, 2),
    ]
    assert not entry.is_at_edge(results)


def test_what_is_in_the_file_is_not_due_again_but_what_failed_is(quality, tmp_path):
    entry = quality.entry_of("every:int4", task="digits", is_quick=False)
    results = quality.Results(tmp_path / "results.json")
    good, bad, _ = entry.due(results)
    results.add(bad, None)
    results.add(good, found(good))
    assert len(entry.due(results)) == 1
    assert results.loss(bad) == math.inf
    again = quality.Results(tmp_path / "results.json")
    assert again.found[good] == found(good)
    assert len(entry.due(again)) == 2


def test_the_report_fits_80_columns_and_the_chart_is_well_formed(quality, tmp_path, capsys):
    results = quality.Results(None)
    entries = [quality.entry_of(text, task="gpt", is_quick=False) for text in ("every", "every:int8", "diloco:H=30")]
    for entry in entries:
        while due := entry.due(results):
            for trial in due:
                results.add(trial, found(trial))
    quality.report_gaps(entries, results, tmp_path / "gaps.svg")
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "every:int8                     4  0.008  2.0100  +0.00%" in printed
    ElementTree.parse(tmp_path / "gaps.svg")


def test_time_to_loss_lies_between_two_points(quality):
    points = [(10.0, 3.0), (20.0, 2.0), (30.0, 1.5)]
    assert quality.time_to_loss(points, 2.5) == 15.0
    assert quality.time_to_loss(points, 3.5) == 10.0
    assert quality.time_to_loss(points, 1.0) is None


def test_the_wall_says_who_comes_to_the_loss_of_ddp_sooner(quality, tmp_path, capsys):
    results, trials = quality.Results(None), []
    for text, seconds in (("ddp", 100.0), ("diloco:H=30:int8", 20.0), ("streaming:H=30:lr=0.7", None)):
        trials.append(quality.entry_of(text, task="gpt", is_quick=False).grid()[0])
        curve = [[10, 10.0, 3.0], [600, seconds or 30.0, 2.0 if seconds else 2.1]]
        results.add(trials[-1], {"held_out_loss": curve[-1][2], "curve": curve})
    quality.report_wall(trials, results, tmp_path / "wall.svg")
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "5.0 ×" in printed
    assert "never" in printed
    ElementTree.parse(tmp_path / "wall.svg")


def test_on_the_wall_others_may_take_longer_than_the_reference(quality):
    args = SimpleNamespace(strategies=["every:int4", "ddp"], quick=False, steps=300, batch=None, lrs=[0.004])
    sizes = [(entry.sync, entry.num_steps, entry.batch, entry.lrs) for entry in quality.wall_entries(args)]
    assert sizes == [("ddp", 300, 4, (0.004,)), ("every:int4", 450, 4, (0.004,))]
