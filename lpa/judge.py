"""How good a model's clean speech is: SI-SNRi with its interval, PESQ and STOI, over utterances with a known noise."""

from __future__ import annotations

import json
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import noise, records
from .audio import RATE, to_float
from .data import AudioBank, open_source, spread
from .enhance import Level, clean, load, run
from .errors import LpaError, choose
from .families.sepformer import SepFormer
from .families.speechbrain import is_speechbrain
from .journal import bar
from .plan import Plan
from .score import mean_interval, si_snr

KINDS = {"white": 0.0, "pink": 1.0, "brown": 2.0, "babble": None}  # the power falls with frequency to this power
VOICES = 6  # in babble
ONE_PASS = 60.0  # seconds; what is longer is enhanced in blocks
HEARD = 100  # utterances, spread over the set, that PESQ and STOI are taken of: they take longer than the model
SEED = 0  # of the noise: the same on an utterance in every evaluation


def enhances(model: str) -> bool:
    """Whether a model folder or hub id is one that `evaluate` judges by SI-SNRi."""
    if (Path(model) / "plan.json").is_file():
        return Plan.read(Path(model)).family == "sepformer"
    return is_speechbrain(model)


def evaluate_folders(
    models: Sequence[str],
    data: str,
    *,
    kind: str = "white",
    snr: float = 5.0,
    limit: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    speakers: tuple[str, ...] = (),
    heard: int = HEARD,
) -> list[dict[str, Any]]:
    """`lpa evaluate` of models that enhance, one after the other on the same noisy speech; `out`: a line an utterance.

    `limit` takes that many utterances, spread evenly over the set and so over its speakers; PESQ and STOI are taken of
    `heard` of them.
    """
    from rich.console import Console
    from rich.progress import Progress

    choose(kind, KINDS, "noise")
    source = open_source(data, include=speakers)
    if limit is not None:
        source.utterances = spread(source.utterances, limit)
    found: list[dict[str, Any]] = []
    every: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bank = AudioBank([source], progress=bar(bars, "reading"))
        for name in models:
            network = load(name, device)
            result, lines = judge(network, bank, kind, snr, heard, progress=bar(bars, "enhancing"))
            found.append({"model": name, "data": str(data), "device": device, **result})
            every += [{"model": name, **line} for line in lines]
    if out:
        Path(out).write_text("".join(json.dumps(line) + "\n" for line in every))
    return found


def judge(
    model: SepFormer,
    bank: AudioBank,
    kind: str,
    snr: float,
    heard: int = HEARD,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(figures, a line an utterance) of a model on a bank with one kind of noise at one ratio, in dB."""
    perceptual = measures() if heard else {}
    chosen = set(np.linspace(0, len(bank) - 1, min(heard, len(bank))).round().astype(int).tolist())
    lines: list[dict[str, Any]] = []
    wall = 0.0
    for index in range(len(bank)):
        wanted = to_float(bank.clip(index))
        noisy = noise.mix(wanted, make_noise(bank, index, kind), snr)
        start = time.perf_counter()
        given = enhanced(model, noisy)
        wall += time.perf_counter() - start
        line = {"id": bank.ids[index], "si_snr": si_snr(given, wanted), "si_snr_noisy": si_snr(noisy, wanted)}
        if index in chosen:
            for name, measure in perceptual.items():
                line |= {name: measure(wanted, given), f"{name}_noisy": measure(wanted, noisy)}
        lines.append(line)
        if progress:
            progress(index + 1, len(bank))
    gains = np.array([line["si_snr"] - line["si_snr_noisy"] for line in lines])
    seconds = float(bank.lengths.sum()) / RATE
    figures = {
        "si_snri": float(gains.mean()),
        "si_snri_interval": mean_interval(gains),
        "si_snr": _mean(lines, "si_snr"),
        "si_snr_noisy": _mean(lines, "si_snr_noisy"),
        **{name: _mean(lines, name) for m in ("pesq", "stoi") for name in (m, f"{m}_noisy")},
        "noise": kind,
        "snr_db": snr,
        "utterances": len(bank),
        "heard": sum(line.get("stoi") is not None or line.get("pesq") is not None for line in lines),
        "audio_seconds": round(seconds, 2),
        "wall_seconds": round(wall, 3),
        "real_time_factor": round(wall / seconds, 5),
        "bad": [{"what": what, "why": why} for what, why in bank.bad],
    }
    return figures, lines


def enhanced(model: SepFormer, samples: np.ndarray) -> np.ndarray:
    """(S,) → (S,): in one pass, or in blocks where that would take much memory."""
    if model.sample_rate != RATE:
        raise LpaError(f"the model hears audio at {model.sample_rate} Hz; only those of {RATE} Hz are judged here")
    column = samples[:, None]
    if len(samples) <= ONE_PASS * RATE:
        return run(model, column)[:, 0]
    return np.concatenate(list(clean(model, [column], Level(1))))[:, 0]


def make_noise(bank: AudioBank, index: int, kind: str) -> np.ndarray:
    """The noise of one utterance: its name decides, not what else is in the bank; but babble is the bank's voices."""
    seed = (SEED, zlib.crc32(bank.ids[index].encode()))
    samples, exponent = int(bank.lengths[index]), KINDS[kind]
    if exponent is not None:
        return noise.coloured(samples, exponent, seed) if exponent else noise.gaussian(samples, seed)
    others = [i for i, speaker in enumerate(bank.speakers) if speaker != bank.speakers[index]]
    if not others:
        raise LpaError("babble needs other speakers; evaluate on more than one")
    chosen = np.random.default_rng(seed).choice(others, VOICES)
    return noise.babble([to_float(bank.clip(i)) for i in chosen], samples, seed)


def measures() -> dict[str, Callable[[np.ndarray, np.ndarray], float | None]]:
    """PESQ (wide band) and STOI, those that are installed; what is missing is said on stderr."""
    found: dict[str, Callable[[np.ndarray, np.ndarray], float | None]] = {}
    try:
        import pesq

        def quality(wanted: np.ndarray, given: np.ndarray) -> float | None:
            score = pesq.pesq(RATE, wanted, given, "wb", on_error=pesq.PesqError.RETURN_VALUES)
            return float(score) if score >= 0 else None  # below: it found no speech to judge

        found["pesq"] = quality
    except ImportError:
        print("lpa: PESQ is left out; for it: pip install pesq", file=sys.stderr)
    try:
        import pystoi

        def intelligibility(wanted: np.ndarray, given: np.ndarray) -> float | None:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                try:
                    return float(pystoi.stoi(wanted, given, RATE))
                except RuntimeWarning:  # too short, or hardly any speech: what it returns then is no measurement
                    return None

        found["stoi"] = intelligibility
    except ImportError:
        print("lpa: STOI is left out; for it: pip install pystoi", file=sys.stderr)
    return found


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return float(np.mean(values)) if values else None


def write_record(result: dict[str, Any], folder: Path) -> None:
    """One line in FOLDER/evaluate.jsonl, beside the word error rates."""
    records.write(
        "evaluate",
        what="si_snri",
        model=result["model"],
        data=result["data"],
        seed=SEED,
        figures={k: v for k, v in result.items() if isinstance(v, int | float)},
        interval=result["si_snri_interval"],
        unit="dB",
        noise=result["noise"],
        folder=folder,
    )


def show(result: dict[str, Any], several: bool) -> str:
    """One line for a terminal."""
    low, high = result["si_snri_interval"]
    text = f"SI-SNRi {result['si_snri']:.2f} dB ({low:.2f} to {high:.2f})"
    for name, label in (("pesq", "PESQ"), ("stoi", "STOI")):
        if result[name] is not None:
            text += f", {label} {result[name]:.3f} (noisy {result[f'{name}_noisy']:.3f})"
    text += f", {result['noise']} noise at {result['snr_db']:g} dB, {result['utterances']} utterances, "
    text += f"real-time factor {result['real_time_factor']:.4f}"
    return f"{result['model']}: {text}" if several else text
