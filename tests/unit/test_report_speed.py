"""What whole models cost: the paper's times and ratios beside ours, each over the same kind of attention."""

import pytest
import report_records

from lpa import records
from lpa.report import measured, paper, speed
from lpa.report.items import DIFFERENT, MISSING, REPRODUCED


@pytest.fixture
def found(tmp_path) -> list[dict]:
    return measured.load(report_records.write(tmp_path))


def timed(folder, gains: dict[int, float], what: str = "model, wav2vec2-base, torch, fp32, wall clock") -> list[dict]:
    """Records of whole models that are so many times as fast with lpa, by seconds."""
    for seconds, gain in gains.items():
        for name, share in (("attention", 1.0), ("lpa", 1 / gain)):
            figures = {"seconds": seconds, "median_ms": 100.0 * seconds * share, "speedup": 1 / share}
            records.write("bench", what=what, model=name, data="random", figures=figures, folder=folder)
    return measured.load(folder)


def test_ours_in_fp32_is_judged_by_the_paper_in_fp32(tmp_path):
    assert [round(gain, 2) for gain in paper.SPEEDUP_FP32.values()] == [0.72, 1.35, 2.03, 3.48]
    alike = speed.judge_speed(timed(tmp_path, paper.SPEEDUP_FP32))
    assert alike.mark == REPRODUCED
    assert "0.72 at 10 s (paper: 0.72)" in alike.what
    assert "3.48 at 120 s (paper: 3.48)" in alike.what
    int8 = timed(tmp_path / "int8", paper.SPEEDUP_FP32, "model, wav2vec2-base, onnx, int8, wall clock")
    assert speed.judge_speed(int8).mark == MISSING


def test_why_the_gain_differs_is_from_the_records_alone(tmp_path):
    verdict = speed.judge_speed(timed(tmp_path, {10: 1.2, 120: 2.2}))
    assert verdict.mark == DIFFERENT
    assert "launch" not in verdict.why
    here = speed.paper_machine(measured.load(tmp_path))
    assert verdict.why == f"ours ran on {here}, the paper's on the GPU of an Apple M4 Pro"


def test_table_3_has_the_paper_s_five_configurations_and_ours_of_two(found):
    grid = speed.table_3(found).grid
    assert grid.columns[1:-1] == (
        *("paper, attention, fp32", "ours, attention, fp32", "paper, attention, fp16", "paper, 8/12 LPA, fp32"),
        *("paper, 12/12 LPA, fp32", "ours, 12/12 LPA, fp32", "paper, 8/12 LPA, MLX fp16"),
    )
    by_seconds = {row[0]: row[1:] for row in grid.rows}
    base, ours, half, eight, twelve, lpa, mlx, gain = by_seconds["10"]
    assert (base, half, eight, twelve, mlx, gain) == (*paper.SPEED[10], "1.07")
    assert (ours.value, lpa.value) == (200.0, 150.0)
    assert by_seconds["30"][1] is by_seconds["30"][5] is None
    assert by_seconds["600"][0] is None


@pytest.mark.parametrize("table", [speed.table_3, speed.table_9])
def test_what_was_not_measured_comes_with_its_command(found, tmp_path, table):
    def said(records_: list[dict]) -> list[str]:
        return [note for note in table(records_).notes if note.startswith("Not measured here")]

    (note,) = said(found)
    assert "30 and 120 s (`lpa bench model --mixer lpa --seconds 30,120 --record` would)" in note
    assert "8 of 12 layers (`lpa bench model RUN/model --record`" in note
    (note,) = said(timed(tmp_path / "all", paper.SPEEDUP_FP32))
    assert "--seconds" not in note
    assert said([]) == []


def test_figure_3_draws_like_over_like_and_the_paper_s_headline(found):
    (chart,) = (chart for chart in speed.figure_3(found).charts if chart.id == "chart-gain")
    drawn = {line.name: dict(line.points) for line in chart.lines}
    assert drawn["paper, 12/12 LPA, fp32 over fp32"] == paper.SPEEDUP_FP32
    assert drawn["paper, 8/12 LPA, MLX fp16 over fp16"] == paper.SPEEDUP_MLX
    assert drawn["ours, 12/12 lpa, fp32 over fp32"][10].value == 1 + 10 / 30
