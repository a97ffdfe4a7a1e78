"""Words from CTC, and transcripts as text, subtitles and JSON."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpa.align import Word, best_posterior, words
from lpa.formats import CUE_LETTERS, CUE_SECONDS, FORMATS, Transcript, clock, cues, lines
from lpa.tokens import LETTERS, Tokens

TOKENS = Tokens()
MARKED = Tokens((*LETTERS, "<s>"))


def path(text: str, tokens: Tokens = TOKENS, sure: float = 5.0) -> np.ndarray:
    """Logits of a path written out: one symbol a frame, _ for the blank, $ for a marker."""
    names = {"_": tokens.symbols[tokens.blank], "$": "<s>"}
    logits = np.zeros((len(text), len(tokens)), np.float32)
    for frame, letter in enumerate(text):
        logits[frame, tokens.symbols.index(names.get(letter, letter))] = sure
    return logits


def test_words_have_times_and_confidences():
    found = words(path("__hh_i__|_y__oou_"), TOKENS, 50.0)
    assert [(w.word, w.start, w.end) for w in found] == [("hi", 2 / 50, 6 / 50), ("you", 10 / 50, 16 / 50)]
    chosen = np.exp(5) / (np.exp(5) + len(TOKENS) - 1)
    assert all(w.confidence == pytest.approx(chosen) for w in found)


def test_confidence_is_the_mean_over_the_letters_frames_alone():
    logits = path("a_b")
    logits[1] *= 100  # a sure blank says nothing of the word
    logits[2] *= 2
    (word,) = words(logits, TOKENS, 50.0)
    rest = len(TOKENS) - 1
    assert word.confidence == pytest.approx(np.mean([np.exp(5) / (np.exp(5) + rest), np.exp(10) / (np.exp(10) + rest)]))


@pytest.mark.parametrize("text", ["", "____", "|||", "_|_|"])
def test_nothing_said_is_no_words(text):
    assert words(path(text), TOKENS, 50.0) == ()


def test_markers_and_doubled_letters():
    assert [w.word for w in words(path("a$b|l_l", MARKED), MARKED, 50.0)] == ["ab", "ll"]


def test_huge_logits_stay_finite():
    assert np.array_equal(best_posterior(np.array([[1e9, 0.0], [-1e9, 1e9]], np.float32)), [1.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="_|$ab", max_size=30))
def test_words_are_the_decoded_text(text):
    logits = path(text, MARKED)
    found = words(logits, MARKED, 50.0)
    assert " ".join(w.word for w in found) == MARKED.decode(logits.argmax(-1).tolist())
    edges = [edge for w in found for edge in (w.start, w.end)]
    assert edges == sorted(edges)
    assert all(w.start < w.end for w in found)


# --- formats

SAID = (Word("he", 0.5, 0.7, 0.9), Word("said", 0.72, 1.0, 0.81234), Word("no", 3661.5, 3661.98, 0.5))
TRANSCRIPT = Transcript("he said no", SAID, 3670.0)


def test_txt():
    assert FORMATS["txt"](TRANSCRIPT, "a.wav") == "he said no\n"


def test_srt():
    assert FORMATS["srt"](TRANSCRIPT, "a.wav") == (
        "1\n00:00:00,500 --> 00:00:01,000\nhe said\n\n2\n01:01:01,500 --> 01:01:01,980\nno\n"
    )


def test_vtt_escapes():
    strange = Transcript("<b>&", (Word("<b>&", 0.0, 1.0, 1.0),), 1.0)
    assert FORMATS["vtt"](strange, "") == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n&lt;b&gt;&amp;\n"
    assert "<b>&" in FORMATS["srt"](strange, "")


def test_json_is_one_line():
    text = FORMATS["json"](TRANSCRIPT, "ä.wav")
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "file": "ä.wav",
        "text": "he said no",
        "seconds": 3670.0,
        "words": [
            {"word": "he", "start": 0.5, "end": 0.7, "confidence": 0.9},
            {"word": "said", "start": 0.72, "end": 1.0, "confidence": 0.8123},
            {"word": "no", "start": 3661.5, "end": 3661.98, "confidence": 0.5},
        ],
    }


def test_nothing_said_in_every_format():
    empty = Transcript("", (), 1.0)
    assert {name: write(empty, "") for name, write in FORMATS.items() if name != "json"} == {
        "txt": "\n",
        "srt": "",
        "vtt": "WEBVTT\n",
    }
    assert json.loads(FORMATS["json"](empty, ""))["words"] == []


def test_subtitles_are_short_and_hold_every_word():
    rng = np.random.default_rng(0)
    said, at = [], 0.0
    for number in range(300):
        at += float(rng.choice([0.1, 0.2, 2.0], p=[0.6, 0.3, 0.1]))
        said.append(Word("x" * int(rng.integers(1, 14)) + str(number), at, at + 0.3, 1.0))
        at += 0.3
    groups = list(cues(said))
    assert [w for cue in groups for w in cue] == said
    for cue in groups:
        assert cue[-1].end - cue[0].start <= CUE_SECONDS
        assert len(" ".join(w.word for w in cue)) <= CUE_LETTERS
        assert all(b.start - a.end <= 1.0 for a, b in pairwise(cue))
        shown = lines(cue)
        assert shown.split() == [w.word for w in cue]
        assert all(len(line) <= 0.75 * CUE_LETTERS for line in shown.split("\n"))
    assert max(len(cue) for cue in groups) > 4


def test_clock_rounds_up_through_the_minute():
    assert clock(59.9996, ",") == "00:01:00,000"
    assert clock(360000.0, ".") == "100:00:00.000"
