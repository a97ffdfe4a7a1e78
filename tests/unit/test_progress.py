"""The time that is left, at the pace of this run; the table as it grows."""

import io

import pytest
from rich.console import Console

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


def drawn(table: progress.Steps, row: dict) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=100).print(table.render(row))
    return screen.getvalue().splitlines()


def test_the_table_grows_by_a_row_a_step(clock):
    table = progress.Steps(4, False, measure())
    table.add(record(0), ran=False)
    names, first = drawn(table, table.rows[0])
    assert names.split() == ["step", "WER", "%", "seconds", "left", "layers"]
    assert first.split() == ["0/4", "10.00", "1", "0"]  # of the time left nothing is known
    clock.now = 60.0
    undone = {**record(1), "layers": [], "wer": None, "stages": [{"reverted": False}, {"reverted": True}]}
    table.add(undone, ran=True)
    (second,) = drawn(table, undone)  # the names are there already
    assert second.split() == ["1/4", "not", "measured", "1", "3.0", "min", "none", "(alignment", "undone)"]
    for name, last in (("step", "1/4"), ("left", "3.0 min"), ("WER %", "not measured")):
        assert names.index(name) + len(name) == second.index(last) + len(last)  # right under their names
    assert names.index("layers") == first.index("0", first.index("1 ")) == second.index("none")


def test_without_a_terminal_it_is_a_line_a_step(clock, capsys):
    table = progress.Steps(2, True, measure())
    table.add(record(0), ran=False)
    clock.now = 60.0
    table.add(record(1), ran=True)
    table.end(None)
    assert capsys.readouterr().err.splitlines() == [
        "step 0/2  layers 0  WER % 10.00",
        "step 1/2  layers 1  WER % 10.00  1.0 min left",
        "finished: WER % not measured",
    ]
