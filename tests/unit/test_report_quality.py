"""Verdicts on what is heard: as kind as the figures, and no kinder."""

import pytest

from lpa.report.items import DIFFERENT, MISSING, REPRODUCED, Figure
from lpa.report.quality import judge_summary, judge_wall

SUMMARY = {n: Figure(30.0 + 2 * n, ("x-1",)) for n in range(9)}
LPA = {n: Figure(30.0 + n, ("x-2",)) for n in range(9)}  # ahead at every depth, by 1 to 8 points


def end(wer: float, spread: float | None = None) -> dict[int, Figure]:
    """What was trained to the end, with its interval where it has one."""
    low, high = (None, None) if spread is None else (wer - spread, wer + spread)
    return {8: Figure(wer, ("x-3",), low, high)}


def test_a_lead_at_every_step_and_at_the_end_is_the_paper_s():
    for tested in (({}, {}), (end(40.0), end(50.0)), (end(40.0, 1.0), end(50.0, 1.0))):
        verdict = judge_summary(LPA, SUMMARY, tested)
        assert verdict.mark == REPRODUCED
        assert "ahead after 8 of 8 steps, by 1.0 to 8.0 points" in verdict.what


@pytest.mark.parametrize(
    ("lpa", "summary", "level"),
    [
        (end(54.72, 0.9), end(54.16, 0.9), True),  # behind by less than the interval
        (end(54.16, 0.9), end(54.72, 0.9), True),  # ahead by less
        (end(60.0, 0.9), end(54.0, 0.9), False),
        (end(60.0), end(54.0), False),  # one run each: no interval to speak of
        (end(54.0), end(54.0), False),
    ],
)
def test_a_lead_that_is_gone_at_the_end_is_not(lpa, summary, level):
    verdict = judge_summary(LPA, SUMMARY, (lpa, summary))
    assert verdict.mark == DIFFERENT
    assert verdict.why
    assert f"{lpa[8].value:.2f} % WER and SummaryMixing {summary[8].value:.2f} on test-clean" in verdict.what
    assert ("interval" in verdict.what) is level


def test_a_step_behind_is_different():
    assert judge_summary(LPA, {**SUMMARY, 4: Figure(33.9, ("x-1",))}, ({}, {})).mark == DIFFERENT
    behind = judge_summary(SUMMARY, LPA, ({}, {}))
    assert (behind.mark, "ahead after 0 of 8 steps (paper" in behind.what) == (DIFFERENT, True)
    assert judge_summary(LPA, {0: SUMMARY[0]}, ({}, {})).mark == MISSING


@pytest.mark.parametrize("without", [0, 8, 9, 10])
def test_the_wall_is_judged_by_curves_that_have_both_its_sides(without):
    line = {n: Figure(10.0 + n, ("x-1",)) for n in range(13) if n != without}
    assert judge_wall(line).mark == MISSING
    assert judge_wall({**line, without: Figure(10.0 + without, ("x-1",))}).mark == DIFFERENT


def test_what_several_layers_cost_together_is_not_one_layer_s():
    line = {n: Figure(10.0 + n, ("x-1",)) for n in (0, 8, 9, 10, 12)}
    line[9], line[10], line[12] = (Figure(wer, ("x-1",)) for wer in (18.2, 22.0, 60.0))
    assert "number 10 alone 3.8, all 12 together 50.0" in judge_wall(line).what
