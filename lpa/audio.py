"""Decode and resample: any file libsndfile reads, as mono float32 at one rate."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
import soxr

from .errors import LpaError

RATE = 16000  # what every model here hears


def read(source: Path | str | bytes, rate: int = RATE, name: str = "") -> np.ndarray:
    """A file, or a file's bytes (`name` says whose), as samples (S,) float32: channels averaged, at `rate`."""
    name = name or ("audio bytes" if isinstance(source, bytes) else str(source))
    try:
        samples, native = soundfile.read(_opened(source), dtype="float32", always_2d=True)  # (S, channels)
    except (soundfile.SoundFileError, OSError) as error:
        raise LpaError(f"{name} cannot be read as audio ({_reason(error)}); replace it or leave it out") from None
    if not len(samples):
        raise LpaError(f"{name} has no samples; replace it or leave it out")
    if not np.isfinite(samples).all():
        raise LpaError(f"{name} has samples that are not numbers (NaN or infinity); replace it or leave it out")
    mono = samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0]
    if native == rate:
        return mono
    resampled = soxr.resample(mono, native, rate)
    if not len(resampled):
        raise LpaError(f"{name} is too short to have a sample at {rate} Hz; replace it or leave it out")
    return resampled


def seconds(path: Path | str) -> float:
    """How long a file lasts, by its header."""
    try:
        return float(soundfile.info(_opened(path)).duration)
    except (soundfile.SoundFileError, OSError) as error:
        raise LpaError(f"{path} cannot be read as audio ({_reason(error)}); replace it or leave it out") from None


def to_int16(samples: np.ndarray) -> np.ndarray:
    """float32 in [-1, 1] as int16; what was 16 bit to begin with comes back as it was."""
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


def to_float(samples: np.ndarray) -> np.ndarray:
    """int16 as float32 in [-1, 1)."""
    return samples.astype(np.float32) / 32768


def _opened(source: Path | str | bytes) -> io.BytesIO | str:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not Path(source).is_file():
        raise LpaError(f"{source} is not there; check the path")
    return str(source)


def _reason(error: Exception) -> str:
    return (getattr(error, "error_string", "") or str(error)).strip().rstrip(".") or type(error).__name__
