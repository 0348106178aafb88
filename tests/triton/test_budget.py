"""What the host does in a pass and in a turn is at most what is recorded (benchmarks/budget.py)."""

from pathlib import Path

import pytest
from zerokl.benchmarks.budget import all_budgets, budget, read_budget, rises
from zerokl.engine.rollout.decode import DecodeRows
from zerokl.kernels import columns_triton

TABLE = Path(__file__).with_name("budget.json")
# A count may rise by so much. `python -m zerokl.benchmarks.budget --record TABLE` renews the table.
PART = 0.02


def test_no_count_is_above_the_recorded_one():
    recorded, now = read_budget(TABLE), all_budgets()
    assert list(now) == ["0.6B", "8B"]
    assert {name: list(parts) for name, parts in now.items()} == {
        name: list(parts) for name, parts in recorded.items()
    }
    assert rises(recorded, now, PART) == []


def test_control_a_launch_for_each_weight_is_found(monkeypatch):
    recorded, launch = {"0.6B": budget("0.6B", layers=2)}, columns_triton.launch

    def for_each_weight(kernel, grid, *args, **options):
        for _ in range(grid[-1]):
            launch(kernel, grid, *args, **options)

    monkeypatch.setattr(columns_triton, "launch", for_each_weight)
    risen = rises(recorded, {"0.6B": budget("0.6B", layers=2)}, PART)
    assert len(risen) == 2
    assert risen[0].startswith("0.6B, pass: launches (")
    assert "launches of add_all_partials" in risen[1]


def test_control_a_wait_and_an_upload_are_found(monkeypatch):
    recorded, look, write = {"0.6B": budget("0.6B", layers=2)}, DecodeRows._look, DecodeRows._write

    def looks_twice(self, turns):
        look(self, turns)
        return look(self, turns)

    def writes_twice(self, rows, n):
        write(self, rows, n)
        write(self, rows, n)

    monkeypatch.setattr(DecodeRows, "_look", looks_twice)
    monkeypatch.setattr(DecodeRows, "_write", writes_twice)
    risen = rises(recorded, {"0.6B": budget("0.6B", layers=2)}, PART)
    assert any(line.startswith("0.6B, look: waits (") for line in risen)
    assert any(line.startswith("0.6B, new rows: uploads (") for line in risen)
    assert not any(line.startswith("0.6B, pass") for line in risen)


@pytest.mark.parametrize(("now", "lines"), [(100, 0), (102, 0), (103, 1)])
def test_a_rise_of_more_than_two_percent_is_one(now, lines):
    recorded = {"0.6B": {"pass": {"launches": 100}}}
    assert len(rises(recorded, {"0.6B": {"pass": {"launches": now}}}, PART)) == lines
    assert len(rises({}, {"0.6B": {"pass": {"launches": now}}}, PART)) == 1
