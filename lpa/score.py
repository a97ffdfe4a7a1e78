"""Transcripts compared: one way to normalise text, WER and CER with the interval that resampling utterances gives."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .errors import LpaError

_QUOTES = str.maketrans({c: "'" for c in "‘’‚‛′`´ʼʻʹ＇"})
# Digits are read one by one ("42" is "four two"): letters say them no other way, and dropping them loses a word.
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGITS = {str(digit): f" {name} " for digit, name in enumerate(_NAMES)}
_BREAKS = re.compile(r"[-‐‑‒–—―−_/\s]+")
_OTHERS = re.compile(r"[^a-z' ]")
_TITLES = {"mr": "mister", "mrs": "missus", "dr": "doctor"}  # LibriSpeech spells them out, most other text does not
_LONE = re.compile(r"(?<![a-z'])'+(?![a-z'])")  # an apostrophe that belongs to no word


def normalise(text: str) -> str:
    """Lower case a-z, apostrophes and single spaces, nothing else; the same in training and in evaluation.

    Accents fall off their letters, typographic quotes become ', hyphens, dashes and slashes become spaces, digits are
    read one by one, titles are spelled out as they are said, everything else is dropped.
    """
    text = text.translate(_QUOTES)  # first: NFKD would split ´ into a space and an accent
    text = unicodedata.normalize("NFKD", text).translate(_QUOTES).lower()
    text = _BREAKS.sub(" ", text)
    text = "".join(_DIGITS.get(c, c) for c in text)
    text = _LONE.sub(" ", _OTHERS.sub("", text))
    return " ".join(_TITLES.get(word, word) for word in text.split())


@dataclass(frozen=True)
class Measure:
    """The one figure a model is judged by."""

    name: str  # its key in records
    label: str  # what people read
    lower: bool  # is better

    def no_worse(self, value: float, than: float) -> bool:
        return value <= than if self.lower else value >= than


MEASURES = {m.name: m for m in (Measure("wer", "WER %", lower=True), Measure("si_snri", "SI-SNRi dB", lower=False))}


@dataclass(frozen=True)
class Score:
    """Error rates in per cent, each with its bootstrap 95 % interval."""

    wer: float
    wer_interval: tuple[float, float]
    cer: float
    cer_interval: tuple[float, float]
    utterances: int
    words: int
    characters: int

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.wer_interval
        return f"WER {self.wer:.2f} % [{low:.2f}, {high:.2f}], CER {self.cer:.2f} %, {self.utterances} utterances"


def score(references: Sequence[str], hypotheses: Sequence[str], *, seed: int = 0, draws: int = 1000) -> Score:
    """WER and CER of hypotheses against references, both normalised here; utterances are what is resampled."""
    if len(references) != len(hypotheses):
        raise LpaError(f"{len(references)} references but {len(hypotheses)} hypotheses; give one for each")
    if not len(references):
        raise LpaError("nothing to score: no utterances")
    pairs = [(normalise(r), normalise(h)) for r, h in zip(references, hypotheses, strict=True)]
    words = [(r.split(), h.split()) for r, h in pairs]
    wer, wer_interval, n_words = _rate(distances(words), [len(r) for r, _ in words], seed, draws)
    cer, cer_interval, n_characters = _rate(distances(pairs), [len(r) for r, _ in pairs], seed, draws)
    return Score(wer, wer_interval, cer, cer_interval, len(pairs), n_words, n_characters)


def distances(pairs: Sequence[tuple[Sequence, Sequence]]) -> np.ndarray:
    """Edits (substitutions, insertions, deletions) from each pair's first to its second; strings or lists of words."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise LpaError("scoring needs jiwer and rapidfuzz; install them with: pip install 'lpa[train]'") from None
    return np.array([Levenshtein.distance(r, h) for r, h in pairs], dtype=np.int64)


def bootstrap(errors: np.ndarray, counts: np.ndarray, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
    """95 % interval, in per cent, of sum(errors) / sum(counts) when utterances are drawn again with replacement."""
    rng = np.random.default_rng(seed)
    both = np.stack([errors, counts], axis=1).astype(np.float64)  # (n, 2)
    rates = []
    chunk = max(1, 4_000_000 // len(errors))  # draws at a time, so that memory stays small for any test set
    for start in range(0, draws, chunk):
        picks = rng.integers(0, len(errors), (min(chunk, draws - start), len(errors)))
        sums = both[picks].sum(axis=1)  # (draws, 2)
        rates.append(100 * sums[:, 0] / np.maximum(sums[:, 1], 1))
    low, high = np.percentile(np.concatenate(rates), [2.5, 97.5])
    return float(low), float(high)


def _rate(errors: np.ndarray, counts: list[int], seed: int, draws: int) -> tuple[float, tuple[float, float], int]:
    total = sum(counts)
    if not total:
        raise LpaError("the references hold no words; an error rate needs some")
    return 100 * float(errors.sum()) / total, bootstrap(errors, np.array(counts), seed, draws), total


# --- audio compared


def si_snr(estimate: np.ndarray, reference: np.ndarray) -> float:
    """Scale-invariant signal-to-noise ratio in dB: the part of the estimate along the reference against all the rest.

    Both (S,); their means do not count. Infinite where nothing is left over.
    """
    if estimate.ndim != 1 or estimate.shape != reference.shape or not len(reference):
        raise LpaError(
            f"estimate {estimate.shape} and reference {reference.shape} must be alike: (samples,), not empty"
        )
    estimate, reference = (a.astype(np.float64) - a.mean(dtype=np.float64) for a in (estimate, reference))
    power = float(reference @ reference)
    if not power:
        raise LpaError("the reference is silent; SI-SNR needs a signal")
    wanted = (float(estimate @ reference) / power) * reference
    rest = estimate - wanted
    signal, noise = float(wanted @ wanted), float(rest @ rest)
    if not signal:
        return -np.inf
    return 10 * float(np.log10(signal / noise)) if noise else np.inf


def si_snr_improvement(estimate: np.ndarray, noisy: np.ndarray, reference: np.ndarray) -> float:
    """SI-SNRi in dB: how much better the estimate is than the noisy recording that it was made from."""
    return si_snr(estimate, reference) - si_snr(noisy, reference)


def mean_interval(values: np.ndarray, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
    """95 % interval of the mean when the values are drawn again with replacement."""
    low, high = bootstrap(values, np.ones(len(values)), seed, draws)
    return low / 100, high / 100
