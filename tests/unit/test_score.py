"""Normalisation and error rates, against examples worked out by hand and against jiwer."""

import random

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpa.errors import LpaError
from lpa.score import bootstrap, distances, normalise, score


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("GO DO YOU HEAR", "go do you hear"),
        ("  It’s  “well-known” — Mr. O‘Neil's!\n", "it's well known mister o'neil's"),
        ("Café naïve Ångström", "cafe naive angstrom"),
        ("and/or", "and or"),
        ("Apollo 13", "apollo one three"),
        ("1ab2", "one ab two"),
        ("' tis 'twas dogs' '' end", "tis 'twas dogs' end"),
        ("", ""),
        ("... 你好 ?!", ""),
        ("ｆｕｌｌ width", "full width"),
        ("Mr. and Mrs. Drew saw Dr. Mrozek", "mister and missus drew saw doctor mrozek"),
    ],
)
def test_normalise(raw, clean):
    assert normalise(raw) == clean


@given(st.text())
def test_normalise_is_idempotent_and_in_the_alphabet(text):
    clean = normalise(text)
    assert normalise(clean) == clean
    assert set(clean) <= set("abcdefghijklmnopqrstuvwxyz' ")
    assert clean == " ".join(clean.split())


def test_rates_by_hand():
    found = score(["the cat sat", "on a mat"], ["the cat sat down", "on mat"])
    assert found.wer == pytest.approx(100 * 2 / 6)  # one insertion, one deletion
    assert found.cer == pytest.approx(100 * (5 + 2) / (11 + 8))
    assert (found.utterances, found.words, found.characters) == (2, 6, 19)
    assert score(["a b"], ["A, b!"]).wer == 0


def test_rates_agree_with_jiwer():
    rng = random.Random(1)
    words = ["one", "two", "three", "four", "it's", "five"]
    pairs = [[" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2)] for _ in range(60)]
    references, hypotheses = map(list, zip(*pairs, strict=True))
    found = score(references, hypotheses)
    assert found.wer == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert found.cer == pytest.approx(100 * jiwer.cer(references, hypotheses))
    assert found.wer_interval[0] < found.wer < found.wer_interval[1]


def test_bootstrap_interval_is_right_and_repeatable():
    rng = np.random.default_rng(0)
    counts = np.full(2000, 20)
    errors = rng.binomial(20, 0.1, 2000)
    low, high = bootstrap(errors, counts, seed=3)
    assert (low, high) == bootstrap(errors, counts, seed=3)
    assert (low, high) != bootstrap(errors, counts, seed=4)
    expected = 1.96 * 100 * np.sqrt(0.1 * 0.9 / 40000)  # the utterances are independent draws
    assert (high - low) / 2 == pytest.approx(expected, rel=0.15)
    assert bootstrap(np.array([1]), np.array([4])) == (25.0, 25.0)


def test_what_cannot_be_scored():
    with pytest.raises(LpaError, match="2 references but 1"):
        score(["a", "b"], ["a"])
    with pytest.raises(LpaError, match="no utterances"):
        score([], [])
    with pytest.raises(LpaError, match="no words"):
        score(["..."], ["a"])
    assert distances([("abc", ""), (["a"], ["a"])]).tolist() == [3, 0]
