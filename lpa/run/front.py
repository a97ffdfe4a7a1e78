"""Audio as a model's first layer wants it, in numpy: what `families` do in torch, for runtimes that have none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LpaError, choose
from ..tokens import Tokens

AT_ONCE = 4096  # frames of one spectrogram pass: memory that does not grow with the recording


@dataclass(frozen=True)
class Processor:
    """processor.json: everything a runtime needs to know beside the network itself."""

    sample_rate: int
    frame_rate: float
    tokens: Tokens
    audio: dict[str, Any]  # kind, and what that kind needs

    @classmethod
    def read(cls, folder: Path) -> Processor:
        path = Path(folder) / "processor.json"
        try:
            data = json.loads(path.read_text())
            tokens = Tokens.from_dict(data["tokens"])
            choose(data["audio"]["kind"], FRONTS, "audio preparation")
            return cls(data["sample_rate"], data["frame_rate"], tokens, data["audio"])
        except FileNotFoundError:
            raise LpaError(f"{folder} has no processor.json; the model folder is damaged") from None
        except (ValueError, TypeError, KeyError) as error:
            raise LpaError(f"{path} is damaged ({type(error).__name__}: {error}); export the model again") from None

    def prepare(self, samples: np.ndarray) -> np.ndarray:
        """Samples (S,) float32 in [-1, 1] → the network's input, a batch of one."""
        return FRONTS[self.audio["kind"]](samples, self.audio)


def log_mel(samples: np.ndarray, audio: dict[str, Any]) -> np.ndarray:
    """Whisper's features, (1, M, mels): log10 of mel power, floored and scaled. Zeros lie either side of the audio."""
    fft, hop = audio["fft"], audio["hop"]
    frames = -(-len(samples) // hop)
    padded = np.pad(samples.astype(np.float32), (fft // 2, fft // 2 + frames * hop - len(samples)))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, fft)[::hop][:frames]  # (M, fft)
    window = np.hanning(fft + 1)[:-1].astype(np.float32)  # periodic
    filters = mel_filters(fft, audio["mels"])
    mel = np.empty((frames, audio["mels"]), np.float32)
    for at in range(0, frames, AT_ONCE):
        spectrum = np.fft.rfft(pieces[at : at + AT_ONCE] * window)
        mel[at : at + AT_ONCE] = (spectrum.real**2 + spectrum.imag**2) @ filters
    log = np.log10(np.maximum(mel, 1e-10))
    floor = log.max() - 8 if audio["floor"] == "recording" else audio["floor"]
    return ((np.maximum(log, np.float32(floor)) + 4) / 4)[None]


def waveform(samples: np.ndarray, audio: dict[str, Any]) -> np.ndarray:
    """(1, S): zero mean and unit variance where the model was trained so."""
    if not audio["normalise"]:
        return samples.astype(np.float32)[None]
    centred = samples - samples.mean(dtype=np.float64)
    return (centred / np.sqrt(np.square(centred).mean() + 1e-7)).astype(np.float32)[None]


FRONTS = {"log-mel": log_mel, "waveform": waveform}


@lru_cache(maxsize=2)
def mel_filters(fft: int, mels: int, rate: int = 16000, top: float = 8000.0) -> np.ndarray:
    """(1 + fft / 2, mels): Slaney's triangles of equal area, linear below 1 kHz and logarithmic above."""
    edges = mel_to_hertz(np.linspace(0.0, hertz_to_mel(top), mels + 2))
    bins = np.linspace(0.0, rate / 2, 1 + fft // 2)[:, None]
    up = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0, np.minimum(up, down))
    return (triangles * 2 / (edges[2:] - edges[:-2])).astype(np.float32)


BREAK_HERTZ, BREAK_MEL = 1000.0, 15.0  # where Slaney's scale turns logarithmic
OCTAVE = 27 / np.log(6.4)  # mels for a factor of e above that


def hertz_to_mel(hertz: float) -> float:
    linear = hertz * BREAK_MEL / BREAK_HERTZ
    return linear if hertz < BREAK_HERTZ else BREAK_MEL + float(np.log(hertz / BREAK_HERTZ)) * OCTAVE


def mel_to_hertz(mel: np.ndarray) -> np.ndarray:
    above = BREAK_HERTZ * np.exp(np.maximum(mel - BREAK_MEL, 0) / OCTAVE)
    return np.where(mel < BREAK_MEL, mel * BREAK_HERTZ / BREAK_MEL, above)
