"""Orders of replacement, surviving pulses and temperatures: pure functions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpa.convert.order import allocation, arrange, groups, surviving, temperature
from lpa.errors import LpaError

SWEPT = {0: {"mse": 0.3, "kl": 0.1}, 1: {"mse": 0.1, "kl": 0.9}, 2: {"mse": 0.1, "kl": 0.5}}


def test_a_sweep_puts_the_easiest_layer_first():
    assert arrange("sweep", 3, SWEPT) == [1, 2, 0]  # of equals the lower one
    assert arrange("kl", 3, SWEPT) == [0, 2, 1]


def test_orders_by_place():
    assert arrange("depth", 4) == [0, 1, 2, 3]
    assert arrange("reverse", 4) == [3, 2, 1, 0]
    assert arrange("2,0", 4) == [2, 0]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_random_orders_are_the_seeds_and_whole(seed, layers):
    found = arrange(f"random:{seed}", layers)
    assert sorted(found) == list(range(layers))
    assert found == arrange(f"random:{seed}", layers)


def test_random_orders_differ_by_seed():
    assert len({tuple(arrange(f"random:{seed}", 12)) for seed in range(20)}) > 15


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("deep", "no order 'deep'"),
        ("random:x", "no order 'random:x'"),
        ("0,3", "no layer 3"),
        ("1,1", "names a layer twice"),
        ("sweep", "no mse of layer 0"),
    ],
)
def test_orders_that_cannot_be_are_named(order, says):
    with pytest.raises(LpaError, match=says):
        arrange(order, 3)


def test_a_sweep_that_lacks_a_layer_is_no_order():
    with pytest.raises(LpaError, match="no kl of layer 1"):
        arrange("kl", 2, {0: {"kl": 0.1}, 1: {"kl": None}})


def test_steps_are_one_layer_each_or_all_at_once():
    assert groups([2, 0, 1], progressive=True) == [(2,), (0,), (1,)]
    assert groups([2, 0, 1], progressive=False) == [(2, 0, 1)]
    assert groups([], progressive=False) == []


def test_pulses_survive_above_theta_and_by_the_floor():
    heads = [
        [0.5, -0.2, 0.05, 0.0, 0.9, 0.0, 0.0, 0.0, 0.3],  # 2 of 4, 1 of 4; the ladder's one
        [0.11, 0.10, -0.11, 0.3, 0.0, 0.0, 0.0, 0.09, 0.0],  # θ itself does not survive
    ]
    counts = {"aperiodic": 4, "periodic": 4, "positional": 0, "ladder": 1}
    assert surviving(heads, counts, 0.1, floor=0) == {"aperiodic": [2, 3], "periodic": [1, 0], "ladder": [1, 0]}
    assert surviving(heads, counts, 0.1, floor=2) == {"aperiodic": [2, 3], "periodic": [2, 2], "ladder": [1, 1]}


def test_the_papers_floor_leaves_48_of_144():
    dead = surviving([[0.0] * 36] * 4, {"aperiodic": 12, "periodic": 12, "positional": 12}, 0.1, 4)
    assert sum(map(sum, dead.values())) == 48
    assert allocation(dead) == {"aperiodic": 4, "periodic": 4, "positional": 4}
    assert allocation({"aperiodic": [4, 4, 4, 9]}) == {"aperiodic": 6}  # 5.25, rounded up


def test_temperature_falls_steadily_from_start_to_end():
    taus = [temperature((3.0, 0.5), step, 11) for step in range(11)]
    assert (taus[0], taus[-1]) == (3.0, 0.5)
    shares = [b / a for a, b in pairwise(taus)]
    assert all(share == pytest.approx(shares[0]) for share in shares)
    assert temperature((3.0, 0.5), 0, 1) == 0.5  # a single step is the last
