"""Greedy CTC over a set of utterances: WER and CER with intervals, speed, and proof that batches change nothing.

The same speech can be heard in longer recordings (utterances joined), and gates at another temperature.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import records
from .audio import RATE
from .data import AudioBank, open_source, spread
from .errors import LpaError
from .families.base import SpeechModel
from .journal import bar
from .run.torch import TorchListener, limit_lookahead
from .score import Score, score
from .surgery import mixer_at
from .transcribe import check_chunk, spans

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
    chunk_seconds: float | None = None  # what was heard at once, where a recording was longer

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
            "chunk_seconds": self.chunk_seconds,
        }


class Joined(AudioBank):
    """The utterances of each speaker laid end to end, in recordings of about so many seconds: the same speech."""

    def __init__(self, bank: AudioBank, seconds: float):
        if seconds <= 0:
            raise LpaError(f"utterances are joined to a number of seconds above 0, not {seconds:g}")
        self.bank = bank
        self.groups = [group for name in dict.fromkeys(bank.speakers) for group in self.cut(name, seconds)]
        self.ids = [bank.ids[g[0]] if len(g) == 1 else f"{bank.ids[g[0]]}..{bank.ids[g[-1]]}" for g in self.groups]
        self.texts = [" ".join(bank.texts[i] for i in group) for group in self.groups]
        self.lengths = np.array([bank.lengths[group].sum() for group in self.groups])

    def cut(self, speaker: str, seconds: float) -> list[np.ndarray]:
        """A speaker's utterances in order, cut into groups whose lengths differ as little as whole utterances allow."""
        mine = np.flatnonzero(np.array(self.bank.speakers) == speaker)
        lengths = self.bank.lengths[mine]
        total = int(lengths.sum())
        count = max(1, round(total / (seconds * RATE)))
        middle = np.cumsum(lengths) - lengths / 2  # (N,)
        groups = (middle * count // total).astype(int)
        return [mine[groups == number] for number in np.unique(groups)]

    def clip(self, index: int) -> np.ndarray:
        return np.concatenate([self.bank.clip(i) for i in self.groups[index]])


class Chunks(AudioBank):
    """A bank with what is longer than `most`, or than a model hears, in chunks that overlap; the rest is as it is."""

    def __init__(self, bank: AudioBank, model: SpeechModel, most: float | None = None):
        self.bank = bank
        self.seconds = min((s for s in (longest(model), most) if s is not None), default=None)
        long = self.seconds is not None and int(bank.lengths.max()) > self.seconds * RATE
        self.seconds = self.seconds if long else None
        listener: Any = TorchListener(model) if long else None
        self.places = [
            (index, *span)  # whose chunk it is, its samples, and which of its frames count
            for index, count in enumerate(bank.lengths.tolist())
            for span in (spans(count, listener, self.seconds) if long else [(0, count, 0, None)])
        ]
        self.ids = [bank.ids[index] for index, *_ in self.places]
        self.lengths = np.array([stop - start for _, start, stop, *_ in self.places])

    def clip(self, index: int) -> np.ndarray:
        owner, start, stop, *_ = self.places[index]
        return self.bank.clip(owner)[start:stop]


def longest(model: SpeechModel) -> float | None:
    """Seconds that a model can hear at once; None: any number."""
    return getattr(model, "longest", None)


def evaluate(
    model: SpeechModel,
    bank: AudioBank,
    *,
    batch_seconds: float = 120.0,
    check: int = 16,
    device: torch.device | str | None = None,
    tolerance: float = TOLERANCE,
    chunk: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Transcribe and score a bank, in eval mode and full precision, on `device` (default: where the model is).

    `check` utterances, spread over the lengths, are also run alone: other logits or another transcript than in a batch
    is an error, because then no figure of the evaluation means anything. `chunk`: seconds to hear at once, at most.
    """
    check_chunk(chunk)
    home, training = next(model.parameters()).device, model.training
    model.to(device or home).eval()
    try:
        with full_precision():
            chunks = Chunks(bank, model, chunk)
            difference, alone = check_padding(model, chunks, check, batch_seconds, tolerance)
            start = time.perf_counter()
            hypotheses = transcribe(model, bank, batch_seconds, progress, chunk)
            wall = time.perf_counter() - start
    finally:
        model.to(home).train(training)
    for index, transcript in alone.items():
        owner, _, stop, *_ = chunks.places[index]
        if stop == bank.lengths[owner] == chunks.lengths[index] and hypotheses[owner] != transcript:
            raise LpaError(
                f"{bank.ids[owner]} reads {transcript!r} alone but {hypotheses[owner]!r} in a batch; {ADVICE}"
            )
    seconds = float(bank.lengths.sum()) / RATE
    scored = score(bank.texts, hypotheses)
    return Evaluation(scored, hypotheses, seconds, wall, len(alone), difference, chunks.seconds)


ADVICE = "padding leaks into the model or its decoding, so no figure would hold"


def transcribe(
    model: SpeechModel,
    bank: AudioBank,
    batch_seconds: float,
    progress: Callable[[int, int], None] | None = None,
    chunk: float | None = None,
) -> list[str]:
    """Greedy transcripts of every utterance, its chunks heard longest first, in batches of like lengths."""
    chunks = Chunks(bank, model, chunk)
    best: list[list[int]] = [[] for _ in chunks.ids]
    done = 0
    for batch in by_length(chunks.lengths, batch_seconds * RATE):
        for index, logits in zip(batch, own_logits(model, chunks, batch), strict=True):
            *_, first, last = chunks.places[index]
            best[index] = logits[first:last].argmax(-1).tolist()
        done += len(batch)
        if progress:
            progress(done, len(chunks))
    found: list[list[int]] = [[] for _ in bank.ids]
    for (owner, *_), ids in zip(chunks.places, best, strict=True):  # a recording's chunks are in order
        found[owner] += ids
    return [model.tokens.decode(ids) for ids in found]


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
    samples = torch.from_numpy(audio).to(device)
    samples = samples.double() if next(model.parameters()).dtype == torch.float64 else samples
    output = model(samples, torch.from_numpy(lengths).to(device))
    if output.logits is None:
        raise LpaError("the model has no CTC head, so it cannot be evaluated; train one first")
    logits = output.logits.float().cpu()
    return [row[:length] for row, length in zip(logits, output.lengths.tolist(), strict=True)]


def greedy(model: SpeechModel, logits: Tensor) -> str:
    """The transcript of the likeliest symbols of (T, V)."""
    return model.tokens.decode(logits.argmax(-1).tolist())


def check_padding(
    model: SpeechModel, chunks: Chunks, count: int, batch_seconds: float, tolerance: float = TOLERANCE
) -> tuple[float, dict[int, str]]:
    """`check_batching` where recordings are short enough to share a batch; longer ones are a batch of their own.

    Where it fails, once more in float64: there rounding is gone, and a leak is not. Gates that were trained to be hard
    need it, for on which side of an edge a frame is can hang on the last bit of a float32.
    """
    padded = 2 * int(chunks.lengths.min()) <= batch_seconds * RATE
    try:
        return check_batching(model, chunks, count if padded else 0, tolerance)
    except LpaError:
        if any(p.dtype != torch.float32 for p in model.parameters()):
            raise
        try:
            return check_batching(model.double(), chunks, count, tolerance)
        finally:
            model.float()


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


def set_gates(model: SpeechModel, tau: str) -> None:
    """Set the temperature of all gates: a number, or `hard`, the limit at 0."""
    mixers = [mixer_at(model, index) for index in model.swaps]
    gated = [mixer for mixer in mixers if getattr(mixer, "in_recording", 0)]
    if not gated:
        raise LpaError("this model has no gates, so it has no temperature; leave --tau out")
    for mixer in gated:
        mixer.hard = tau == "hard"
        if not mixer.hard:
            try:
                mixer.tau = float(tau)
            except ValueError:
                raise LpaError(f"--tau is a number, or hard, not {tau}") from None
            if not mixer.tau > 0:
                raise LpaError(f"--tau must be above 0, not {tau}; its limit is called hard")


def evaluate_folder(model: str, data: str, **options: Any) -> dict[str, Any]:
    """One model by name on data by name: see `evaluate_folders`."""
    return evaluate_folders([model], data, **options)[0]


def evaluate_folders(
    models: Sequence[str],
    data: str,
    *,
    join: Sequence[float] = (),
    tau: Sequence[str] = (),
    latency: Sequence[float] = (),
    chunk: float | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    batch_seconds: float = 120.0,
    check: int = 16,
    device: str | None = None,
    speakers: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """`lpa evaluate`: models by name on data by name, with a progress bar; `out` gets one JSON line an utterance.

    `limit` takes that many utterances, spread evenly over the set and so over its speakers. Each model is heard once
    for every one of `join` (seconds that utterances are joined to), `tau` and `latency` (seconds it may look ahead):
    audio is read once for all.
    """
    from rich.console import Console
    from rich.progress import Progress

    from .families import load

    source = open_source(data, include=speakers)
    if limit is not None:
        source.utterances = spread(source.utterances, limit)
    cases = list(product(models, join or (None,), tau or (None,), latency or (None,)))
    if out and len(cases) > 1:
        raise LpaError(f"{len(cases)} evaluations cannot share one --out; do them one by one")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    networks = {name: load(name, device=device, dtype=torch.float32) for name in models}
    found = []
    sharpened: set[str] = set()  # models whose gates are no longer as they were trained
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bank = AudioBank([source], progress=bar(bars, "reading"))
        banks = {seconds: bank if seconds is None else Joined(bank, seconds) for seconds in join or (None,)}
        for name, seconds, at, ahead in cases:
            network = networks[name]
            if ahead is not None:
                network = load(name, device=device, dtype=torch.float32)
                limit_lookahead(network, ahead)
            heard, tell = banks[seconds], bar(bars, "transcribing")
            count = check
            if (
                at is not None
            ):  # checked as it was trained: on which side of a sharp edge a frame is hangs on a last bit
                if name not in sharpened:
                    with full_precision():
                        check_padding(network.eval(), Chunks(heard, network, chunk), check, batch_seconds, TOLERANCE)
                sharpened.add(name)
                set_gates(network, at)
                count = 0
            result = evaluate(network, heard, batch_seconds=batch_seconds, check=count, chunk=chunk, progress=tell)
            if out:
                lines = (
                    {"id": i, "reference": r, "hypothesis": h}
                    for i, r, h in zip(heard.ids, heard.texts, result.hypotheses, strict=True)
                )
                Path(out).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            bad = [{"what": what, "why": why} for what, why in bank.bad]
            about = {"model": str(name), "data": str(data), "device": device, "network": describe(network)}
            found.append(
                {**about, "join_seconds": seconds, "tau": at, "latency": ahead, **result.to_dict(), "bad": bad}
            )
    return found


def describe(model: SpeechModel) -> dict[str, Any]:
    """What a record says of a network."""
    mixers = sorted({swap.mixer for swap in model.swaps.values()})
    return {"family": model.family, "layers": len(model.sites()), "replaced": len(model.swaps), "mixers": mixers}


def write_record(result: dict[str, Any], folder: Path | str) -> None:
    """Add a result to FOLDER/evaluate.jsonl; of a conversion's model also what it was made with."""
    names = ("wer", "cer", "utterances", "words", "audio_seconds", "wall_seconds", "real_time_factor")
    figures = {name: result[name] for name in names}
    if result["join_seconds"]:
        figures["seconds"] = result["join_seconds"]
        figures["mean_seconds"] = round(result["audio_seconds"] / result["utterances"], 2)
    more = {name: result[name] for name in ("network", "tau", "latency", "chunk_seconds", "device")}
    above = Path(result["model"]).parents[:2]  # of RUN/model and RUN/step-NN/model
    runs = [run for run in above if (run / "order.json").is_file()]
    config = json.loads((runs[0] / "config.json").read_text()) if runs else {}
    records.write(
        "evaluate",
        what="wer",
        model=result["model"],
        data=result["data"],
        seed=config.get("seed"),
        figures=figures,
        interval=result["wer_interval"],
        folder=folder,
        unit="percent",
        config=config or None,
        **more,
    )


def show(result: dict[str, Any], several: bool) -> str:
    """A result as a line; of several it says which one it is."""
    low, high = result["wer_interval"]
    which = [result["model"]] if several else []
    which += [f"joined to {result['join_seconds']:g} s"] if result["join_seconds"] else []
    which += [f"gates {result['tau']}"] if result["tau"] else []
    which += [f"{result['latency']:g} s ahead"] if result["latency"] is not None else []
    chunks = f", heard in chunks of {result['chunk_seconds']:g} s" if result["chunk_seconds"] else ""
    return (
        f"{', '.join(which)}{': ' if which else ''}WER {result['wer']:.2f} % ({low:.2f} to {high:.2f}), "
        f"CER {result['cer']:.2f} %, {result['utterances']} utterances, "
        f"real-time factor {result['real_time_factor']:.4f}{chunks}"
    )
