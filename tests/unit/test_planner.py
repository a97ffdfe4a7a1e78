"""The planner finds what trying everything finds."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpa.convert import planner
from lpa.convert.planner import Option, cheapest, describe, option, plan
from lpa.errors import LpaError

NUMBER = st.integers(0, 20).map(float)  # whole numbers, so that sums are exact
ROWS = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=4), min_size=1, max_size=5)


def brute(rows, limit):
    fits = [
        sum(p for p, _ in combination)
        for combination in itertools.product(*rows)
        if sum(w for _, w in combination) <= limit
    ]
    return min(fits, default=None)


@settings(max_examples=300, deadline=None)
@given(ROWS, st.integers(0, 60).map(float))
def test_equals_brute_force(rows, limit):
    found = cheapest(rows, limit)
    best = brute(rows, limit)
    if best is None:
        assert found is None
        return
    chosen = [row[i] for row, i in zip(rows, found, strict=True)]
    assert sum(p for p, _ in chosen) == best
    assert sum(w for _, w in chosen) <= limit


def test_a_thinned_front_still_fits_and_is_nearly_the_cheapest(monkeypatch):
    rng = random.Random(0)
    rows = [[(rng.random(), rng.random()) for _ in range(4)] for _ in range(7)]
    exact = brute(rows, 2.0)
    monkeypatch.setattr(planner, "FRONT", 40)
    chosen = [row[i] for row, i in zip(rows, cheapest(rows, 2.0), strict=True)]
    assert sum(w for _, w in chosen) <= 2.0
    assert exact <= sum(p for p, _ in chosen) < 1.2 * exact


LAYERS = [
    [Option("attention", 300.0, 0.0), Option("pyramid", 240.0, 0.1), Option("lpa", 65.0, 0.2)],
    [Option("attention", 300.0, 0.0), Option("pyramid", 240.0, 0.2), Option("lpa", 65.0, 9.0)],
]


def test_a_loss_budget_buys_the_cheapest_and_a_price_the_best():
    assert [o.mixer for o in plan(LAYERS, loss=0.5)] == ["lpa", "pyramid"]
    assert [o.mixer for o in plan(LAYERS, loss=0.0)] == ["attention", "attention"]
    assert [o.mixer for o in plan(LAYERS, cost=540.0)] == ["pyramid", "attention"]
    assert [o.mixer for o in plan(LAYERS, cost=305.0)] == ["lpa", "pyramid"]


def test_budgets_that_nothing_fits_are_named():
    with pytest.raises(LpaError, match="no choice of mixers fits a budget of 100; the least is 130"):
        plan(LAYERS, cost=100.0)
    with pytest.raises(LpaError, match="one budget"):
        plan(LAYERS)


def test_a_choice_says_what_it_predicts_and_lists_the_easiest_first():
    found = describe(plan(LAYERS, loss=0.5), "kl", {"loss": 0.5, "mflop_per_second": None})
    assert found["predicted"] == {"kl": pytest.approx(0.4), "mflop_per_second": 305.0}
    assert [(s["index"], s["mixer"]) for s in found["swaps"]] == [(0, "lpa"), (1, "pyramid")]
    assert [s["index"] for s in describe(plan(LAYERS, loss=0.0), "kl", {})["swaps"]] == []


def test_points_are_predicted_whatever_is_measured():
    def row(mixer, kl, points):
        return option({"mixer": mixer, "mflop_per_second": 1.0, "config": {}, "kl": kl, "wer_points": points}, "kl")

    chosen = [Option("attention", 300.0, 0.0, points=0.0), row("pyramid", 0.2, 0.7), row("ladder", 0.1, -0.4)]
    found = describe(chosen, "kl", {}, layers=[1, 4, 5])
    assert found["predicted"] == {"kl": pytest.approx(0.3), "mflop_per_second": 302.0, "wer_points": 0.7}
    assert [swap["index"] for swap in found["swaps"]] == [5, 4]  # by their place in the model
    assert [layer["layer"] for layer in found["layers"]] == [1, 4, 5]
    unknown = describe([*chosen, row("lpa", 0.1, None)], "kl", {})
    assert "wer_points" not in unknown["predicted"]


def test_a_gain_counts_as_no_loss_and_a_missing_figure_is_an_error():
    row = {"mixer": "pyramid", "mflop_per_second": 1.0, "config": {}, "wer_points": -0.5, "kl": None}
    assert option(row, "wer_points").loss == 0.0
    with pytest.raises(LpaError, match="has no kl"):
        option(row, "kl")
