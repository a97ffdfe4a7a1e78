"""The time that is left, at the pace of this run."""

import pytest

from lpa.convert import progress
from lpa.score import Measure


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def record(step: int) -> dict:
    return {"step": step, "layers": [step], "stages": [], "wer": 10.0, "seconds": 1.0}


def measure() -> Measure:
    from lpa.task import TASKS

    return TASKS["transcribe"].measure


def test_time_left_is_by_epochs_of_training(clock):
    table = progress.Steps(2, False, measure(), epochs=(3.0, 4.0))  # 3 a step, 4 after both: 10 in all
    table.add(record(0), ran=False)
    assert table.left() == ""  # nothing has run yet
    clock.now = 60.0
    table.stage(1.0)
    assert table.left() == "9.0 min"
    clock.now = 180.0
    table.stage(2.0)
    table.add(record(1), ran=True)
    assert table.left() == "7.0 min"
    clock.now = 360.0
    table.stage(3.0)
    table.add(record(2), ran=True)
    assert table.left() == "4.0 min"
    table.stage(4.0)
    assert table.left() == ""


def test_steps_of_an_earlier_run_are_no_pace(clock):
    table = progress.Steps(3, False, measure(), epochs=(1.0, 0.0))
    for step in range(2):
        table.add(record(step), ran=False)
    assert table.left() == ""
    clock.now = 60.0
    table.add(record(2), ran=True)
    assert table.left() == "1.0 min"


def test_without_training_it_is_by_steps(clock):
    table = progress.Steps(4, False, measure())
    table.add(record(0), ran=False)
    clock.now = 60.0
    table.add(record(1), ran=True)
    assert table.left() == "3.0 min"
    assert table.render().caption == "3.0 min left"
