"""Greedy CTC over a set of utterances: WER and CER with intervals, speed, and proof that batches change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .audio import RATE
from .data import AudioBank, open_source
from .errors import LpaError
from .families.base import SpeechModel
from .score import Score, score

GROUP = 4  # utterances that are checked in one batch, from short to long so that most are padded
TOLERANCE = 1e-3  # of logits in float32


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a bank, in the bank's order."""

    score: Score
    hypotheses: list[str]
    audio_seconds: float
    wall_seconds: float
    checked: int  # utterances that were run alone as well
    largest_difference: float  # between their logits alone and in a batch

    @property
    def real_time_factor(self) -> float:
        """Wall seconds a second of audio: below one is faster than real time."""
        return self.wall_seconds / self.audio_seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.score.to_dict(),
            "audio_seconds": round(self.audio_seconds, 2),
            "wall_seconds": round(self.wall_seconds, 3),
            "real_time_factor": round(self.real_time_factor, 5),
            "batch_check": {"utterances": self.checked, "largest_difference": self.largest_difference},
        }


def evaluate(
    model: SpeechModel,
    bank: AudioBank,
    *,
    batch_seconds: float = 120.0,
    check: int = 16,
    device: torch.device | str | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Transcribe and score a bank, in eval mode and full precision, on `device` (default: where the model is).

    `check` utterances, spread over the lengths, are also run alone: other logits or another transcript than in a batch
    is an error, because then no figure of the evaluation means anything.
    """
    home, training = next(model.parameters()).device, model.training
    model.to(device or home).eval()
    try:
        with full_precision():
            difference, alone = check_batching(model, bank, check, tolerance)
            start = time.perf_counter()
            hypotheses = transcribe(model, bank, batch_seconds, progress)
            wall = time.perf_counter() - start
    finally:
        model.to(home).train(training)
    for index, transcript in alone.items():
        if hypotheses[index] != transcript:
            raise LpaError(
                f"{bank.ids[index]} reads {transcript!r} alone but {hypotheses[index]!r} in a batch; {ADVICE}"
            )
    seconds = float(bank.lengths.sum()) / RATE
    return Evaluation(score(bank.texts, hypotheses), hypotheses, seconds, wall, len(alone), difference)


ADVICE = "padding leaks into the model or its decoding, so no figure would hold"


def transcribe(
    model: SpeechModel, bank: AudioBank, batch_seconds: float, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Greedy transcripts of every utterance, longest first, in batches of like lengths."""
    found = [""] * len(bank)
    done = 0
    for batch in by_length(bank.lengths, batch_seconds * RATE):
        for index, logits in zip(batch, own_logits(model, bank, batch), strict=True):
            found[index] = greedy(model, logits)
        done += len(batch)
        if progress:
            progress(done, len(bank))
    return found


def by_length(lengths: np.ndarray, limit: float) -> Iterator[np.ndarray]:
    """Indices from the longest down (a batch that does not fit in memory is the first), at most `limit` when padded."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, int(limit // lengths[order[start]]))
        yield order[start : start + count]
        start += count


@torch.inference_mode()
def own_logits(model: SpeechModel, bank: AudioBank, indices: np.ndarray) -> list[Tensor]:
    """The logits of a batch, each utterance's cut to the frames that are its own: (T, V) float32, on the CPU."""
    device = next(model.parameters()).device
    audio, lengths = bank.gather(indices)
    output = model(torch.from_numpy(audio).to(device), torch.from_numpy(lengths).to(device))
    if output.logits is None:
        raise LpaError("the model has no CTC head, so it cannot be evaluated; train one first")
    logits = output.logits.float().cpu()
    return [row[:length] for row, length in zip(logits, output.lengths.tolist(), strict=True)]


def greedy(model: SpeechModel, logits: Tensor) -> str:
    """The transcript of the likeliest symbols of (T, V)."""
    return model.tokens.decode(logits.argmax(-1).tolist())


def check_batching(
    model: SpeechModel, bank: AudioBank, count: int, tolerance: float = TOLERANCE
) -> tuple[float, dict[int, str]]:
    """Run `count` utterances alone and in batches of very different lengths; (largest difference, transcripts alone).

    Batches of like lengths, as evaluation has them, hardly pad: an error would be small there, and here it is plain.
    """
    order = np.argsort(bank.lengths, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]
    groups = -(-len(chosen) // GROUP)
    largest, alone = 0.0, {}
    for group in (chosen[i::groups] for i in range(groups)):
        for index, batched in zip(group, own_logits(model, bank, group), strict=True):
            (single,) = own_logits(model, bank, np.array([index]))
            if single.shape != batched.shape:
                raise LpaError(
                    f"{bank.ids[index]} has {len(single)} frames alone but {len(batched)} in a batch; {ADVICE}"
                )
            difference = float((single - batched).abs().max()) if len(single) else 0.0
            if not difference <= tolerance:  # so that NaN fails
                raise LpaError(
                    f"{bank.ids[index]}: its logits alone and in a batch differ by {difference:.3g}; {ADVICE}"
                )
            largest = max(largest, difference)
            alone[int(index)] = greedy(model, single)
    return largest, alone


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 inside: with it, the kernels picked for one batch size and another differ by more than rounding."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


def evaluate_folder(
    model: str,
    data: str,
    *,
    limit: int | None = None,
    out: str | Path | None = None,
    batch_seconds: float = 120.0,
    check: int = 16,
    device: str | None = None,
    speakers: tuple[str, ...] = (),
) -> dict[str, Any]:
    """`lpa evaluate`: a model by name on data by name, with a progress bar; `out` gets one JSON line an utterance.

    `limit` takes that many utterances, spread evenly over the set and so over its speakers.
    """
    from rich.console import Console
    from rich.progress import Progress

    from .families import load

    source = open_source(data, include=speakers)
    if limit is not None:
        if limit < 1:
            raise LpaError(f"limit must be at least 1, not {limit}")
        picks = np.unique(np.linspace(0, len(source.utterances) - 1, min(limit, len(source.utterances))).astype(int))
        source.utterances = [source.utterances[i] for i in picks]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    network = load(model, device=device, dtype=torch.float32)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bank = AudioBank([source], progress=_bar(bars, "reading"))
        result = evaluate(network, bank, batch_seconds=batch_seconds, check=check, progress=_bar(bars, "transcribing"))
    if out:
        lines = (
            {"id": i, "reference": r, "hypothesis": h}
            for i, r, h in zip(bank.ids, bank.texts, result.hypotheses, strict=True)
        )
        Path(out).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    bad = [{"what": what, "why": why} for what, why in bank.bad]
    return {"model": str(model), "data": str(data), "device": device, **result.to_dict(), "bad": bad}


def _bar(bars, name: str) -> Callable[[int, int], None]:
    task = bars.add_task(name, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
