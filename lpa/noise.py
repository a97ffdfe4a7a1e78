"""What recordings have besides speech: noise (Gaussian, coloured, other voices) mixed at a given ratio, and rooms.

All of it the same every time for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import LpaError

Seed = int | Sequence[int]  # (seed, number of the utterance), say: the same noise on it whatever else is mixed
LOWEST = 40  # Hz; below it a colour is flat, as all its power would lie where nothing is heard


def mix(speech: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Speech (S,) with noise (S,) so loud that the ratio of their mean powers is `snr` dB, to rounding."""
    if speech.ndim != 1 or speech.shape != noise.shape or not len(speech):
        raise LpaError(f"speech {speech.shape} and noise {noise.shape} must be alike: (samples,), not empty")
    loud, level = power(speech), power(noise)
    if not loud or not level:
        raise LpaError(f"the {'noise' if loud else 'speech'} is silent; a ratio needs both")
    factor = np.sqrt(loud / level * 10 ** (-snr / 10))
    return (speech + factor * noise).astype(np.float32)


def power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))


def gaussian(samples: int, seed: Seed) -> np.ndarray:
    """White Gaussian noise (samples,) of unit power on average."""
    return np.random.default_rng(seed).standard_normal(samples).astype(np.float32)


def coloured(samples: int, exponent: float, seed: Seed, rate: int = 16000) -> np.ndarray:
    """Noise whose power falls as 1/frequency^exponent: 0 white, 1 pink, 2 brown; of unit power."""
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(samples))
    frequency = np.fft.rfftfreq(samples, 1 / rate)
    noise = np.fft.irfft(spectrum / np.maximum(frequency, LOWEST) ** (exponent / 2), samples)
    return (noise / np.sqrt(power(noise))).astype(np.float32)


def babble(voices: Sequence[np.ndarray], samples: int, seed: Seed) -> np.ndarray:
    """Other utterances talking at once, each as loud as any, begun anywhere and begun again when it ends; unit power.

    Which voices: the caller's choice, never the speaker's own.
    """
    if not voices:
        raise LpaError("babble needs other utterances; give some")
    rng = np.random.default_rng(seed)
    total = np.zeros(samples)
    for voice in voices:
        loudness = np.sqrt(power(voice)) if len(voice) else 0.0
        if not loudness:
            raise LpaError("an utterance for babble is silent; leave it out")
        start = int(rng.integers(len(voice)))
        total += np.take(voice, np.arange(start, start + samples), mode="wrap") / loudness
    return (total / np.sqrt(power(total))).astype(np.float32)


def room(samples: int, seed: Seed, rate: int = 16000) -> np.ndarray:
    """An impulse response (samples,) of unit power: the sound itself at once, unevenly, then a short tail of echoes."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / rate
    tail = rng.standard_normal(samples) * 10 ** (-3 * time / rng.uniform(0.1, 0.5))  # by 60 dB in that many seconds
    tail[: rate // 500] = 0  # nothing comes back within 2 ms
    tail *= 10 ** (rng.uniform(-25, -3) / 20) / np.sqrt(np.square(tail).sum())
    tail[0] = 1
    octaves = np.log2(np.maximum(np.fft.rfftfreq(2 * samples, 1 / rate), 62.5) / 62.5)  # 0 … 7
    decibels = np.interp(octaves, np.arange(8), rng.normal(0, 4, 8))
    spectrum = np.fft.rfft(tail, 2 * samples) * _no_later_than_needed(10 ** (decibels / 20))
    response = np.fft.irfft(spectrum, 2 * samples)[:samples]
    return (response / np.sqrt(np.square(response).sum())).astype(np.float32)


def _no_later_than_needed(magnitudes: np.ndarray) -> np.ndarray:
    """The spectrum with these magnitudes (F,) and the least delay (minimum phase), by folding the cepstrum."""
    cepstrum = np.fft.irfft(np.log(magnitudes))
    half = len(cepstrum) // 2
    cepstrum[1:half] *= 2
    cepstrum[half + 1 :] = 0
    return np.exp(np.fft.rfft(cepstrum))
