"""Words with times and confidences, read off the greedy CTC path. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .tokens import Tokens, is_marker


@dataclass(frozen=True)
class Word:
    """One word as it was heard: seconds from the recording's start, and the mean posterior of its letters' frames."""

    word: str
    start: float
    end: float
    confidence: float


def words(logits: np.ndarray, tokens: Tokens, frame_rate: float) -> tuple[Word, ...]:
    """The words of logits (T, V), of which `tokens.decode` makes the same text. Frame t lasts from t / frame_rate on.

    A letter is heard in a few frames and blanks follow it, so a word ends with its last letter, not with the next word.
    """
    labels = logits.argmax(-1)
    posterior = best_posterior(logits)
    found: list[Word] = []
    letters: list[str] = []
    frames: list[int] = []  # those of the letters so far

    def close() -> None:
        if letters:
            times = frames[0] / frame_rate, (frames[-1] + 1) / frame_rate
            found.append(Word("".join(letters), *times, float(posterior[frames].mean())))
        letters.clear()
        frames.clear()

    for label, run in groupby(range(len(labels)), key=labels.__getitem__):
        symbol = tokens.symbols[label]
        if label == tokens.blank:
            continue
        if symbol == tokens.word_gap:
            close()
        elif not is_marker(symbol):
            letters.append(symbol)
            frames.extend(run)
    close()
    return tuple(found)


def best_posterior(logits: np.ndarray) -> np.ndarray:
    """The probability of each frame's likeliest symbol: (T, V) → (T,)"""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True, initial=-np.inf)
    return 1 / np.exp(shifted).sum(-1)
