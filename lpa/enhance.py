"""Noisy recordings made clean: any length, block by block in bounded memory; the rate and the channels are kept."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import soxr
import torch

from . import families
from .errors import LpaError, choose
from .families.sepformer import SepFormer
from .families.speechbrain import load_speechbrain
from .transcribe import known_seconds, progress_bar

DEFAULT = Path(__file__).parent / "models" / "enhance"  # the model that comes with the package
BLOCK = 8.0  # seconds that a block gives
MARGIN = 1.0  # seconds it hears before and after them, where the model's reach does not say how many it needs
LONGEST_MARGIN = 8.0  # seconds of reach that are heard
FADE = 0.02  # seconds over which one block's output goes over into the next's
PIECE = 1 << 16  # samples read, or written, at a time
FORMS = {"wav": "WAV", "flac": "FLAC"}
LARGEST_WAV = (1 << 32) - (1 << 16)  # bytes of samples; what is larger is a wav of the form RF64
DEPTHS = {"PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}  # bytes; kept where the form has them

Progress = Callable[[float], None]  # called with the seconds of audio that are done


# --- models


def load(source: str | Path, device: str = "cpu") -> SepFormer:
    """A SepFormer in eval mode, from an lpa model folder, a speechbrain folder or a hub id."""
    if source == "default":
        source = DEFAULT
        if not (DEFAULT / "plan.json").is_file():
            raise LpaError(
                "there is no built-in enhancement model in this installation; name yours with --model FOLDER"
            )
    if not (Path(source) / "plan.json").is_file():
        return families.place(load_speechbrain(source), device)
    model = families.load(source, device=device)
    if not isinstance(model, SepFormer):
        raise LpaError(f"{source} holds a {model.family} model, which hears words; enhancement needs a sepformer")
    return model


# --- samples


def enhance(
    model: SepFormer, samples: np.ndarray, rate: int, *, block: float = BLOCK, margin: float | None = None
) -> np.ndarray:
    """Samples (S,) or (S, channels) in [-1, 1] at any rate → as many, clean, at the level they have in the input."""
    if samples.ndim not in (1, 2) or not samples.size or not np.isfinite(samples).all():
        raise LpaError(f"audio is {samples.shape}; it must be finite, (samples,) or (samples, channels), and not empty")
    columns = np.ascontiguousarray(samples.reshape(len(samples), -1), np.float32)
    level = Level(columns.shape[1])
    parts = list(stream(model, [columns], rate, level, block, margin))
    return (np.concatenate(parts) * level.gain()).reshape(samples.shape)


class Level:
    """What it takes to give a model's output, whose scale means nothing, the level that the speech has in the input.

    That is the factor with which the output comes closest to the input. Noise has no part in it where it is not like
    the speech; and the sign, which the training left open as well, comes right.
    """

    def __init__(self, channels: int):
        self.common, self.power, self.peak = (np.zeros(channels) for _ in range(3))

    def compare(self, heard: np.ndarray, given: np.ndarray) -> None:
        given = given.astype(np.float64)
        self.common += (heard * given).sum(0)
        self.power += (given**2).sum(0)

    def gain(self) -> np.ndarray:
        """(channels,) float32, so small that nothing clips."""
        gain = np.divide(self.common, self.power, out=np.ones_like(self.power), where=self.power > 0)
        return (gain / max(1.0, float((np.abs(gain) * self.peak).max()))).astype(np.float32)


def stream(
    model: SepFormer, pieces: Iterable[np.ndarray], rate: int, level: Level, block: float, margin: float | None
) -> Iterator[np.ndarray]:
    """Pieces (n, channels) of a recording at `rate` → pieces of as many samples in all, without their gain."""
    count = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal count
        for piece in pieces:
            count += len(piece)
            yield piece

    own = model.sample_rate
    written = 0
    for part in resample(clean(model, resample(counted(), rate, own), level, block, margin), own, rate):
        part = part[: count - written]  # resampling there and back can end a sample late
        written += len(part)
        level.peak = np.maximum(level.peak, np.abs(part).max(0, initial=0))
        yield part
    if written < count:
        yield np.zeros((count - written, len(level.peak)), np.float32)


def resample(pieces: Iterable[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    if rate == wanted:
        yield from pieces
        return
    resampler = None
    for piece in pieces:
        resampler = resampler or soxr.ResampleStream(rate, wanted, piece.shape[1], "float32")
        yield resampler.resample_chunk(piece)
    if resampler:
        yield resampler.resample_chunk(piece[:0], last=True)


def clean(
    model: SepFormer, pieces: Iterable[np.ndarray], level: Level, block: float = BLOCK, margin: float | None = None
) -> Iterator[np.ndarray]:
    """Pieces (n, channels) at the model's rate → pieces of as many samples in all.

    Each block gives `block` seconds and hears `margin` more on either side, all of it whole chunks of the model's.
    Where the model's reach lies within the margin, blocks give what one pass gives; without one it is set so.
    """
    margin = margin_of(model) if margin is None else margin
    hop, side = (max(1, -(-round(s * model.sample_rate) // model.grid)) * model.grid for s in (block, margin))
    fade = max(2, min(round(FADE * model.sample_rate), side) // 2 * 2)
    rise = ((np.arange(fade, dtype=np.float32) + 0.5) / fade)[:, None]
    source = iter(pieces)
    buffer, begin, core = next(source, np.zeros((0, 1), np.float32)), 0, 0  # `begin`: the place of the buffer's first
    faded = None
    while True:
        waiting, ended = [buffer], False
        held = begin + len(buffer)
        while held <= core + hop + side and not ended:  # one sample more than a block hears: there is another
            piece = next(source, None)
            ended = piece is None
            if piece is not None:
                waiting.append(piece)
                held += len(piece)
        buffer = np.concatenate(waiting)
        if not len(buffer):
            return
        last = held <= core + hop + side
        heard = buffer[: held - begin if last else core + hop + side - begin]
        start = max(0, core - fade // 2) - begin
        stop = len(heard) if last else core + hop + fade // 2 - begin
        given = run(model, heard)[start:stop]
        if faded is not None:
            given[:fade] = faded + rise * (given[:fade] - faded)
        if not last:
            given, faded = given[:-fade], given[-fade:].copy()
        level.compare(heard[start : start + len(given)], given)
        yield given
        if last:
            return
        core += hop
        buffer, begin = buffer[max(0, core - side) - begin :], max(0, core - side)


def margin_of(model: SepFormer) -> float:
    """Seconds to hear on either side of a block: all that its output depends on, where that is bounded and not long."""
    seconds = math.inf if model.reach is None else model.reach / model.sample_rate + FADE
    return seconds if seconds <= LONGEST_MARGIN else MARGIN


def run(model: SepFormer, samples: np.ndarray) -> np.ndarray:
    """One pass a channel over samples (n, channels), zeros added up to whole frames."""
    kernel, step = model.config.kernel, model.config.kernel // 2
    pad = max(kernel - len(samples), -(len(samples) - kernel) % step)
    device = next(model.parameters()).device
    columns = torch.from_numpy(np.pad(samples, ((0, pad), (0, 0))).T.copy()).to(device)  # (channels, n)
    with torch.no_grad():
        given = [model.clean(column.unsqueeze(0))[0, : len(samples)] for column in columns]
    return torch.stack(given, 1).float().cpu().numpy()


# --- files


def enhance_file(
    model: SepFormer,
    source: str | Path,
    target: Path,
    *,
    block: float = BLOCK,
    margin: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the clean form of a file, with its rate, channels, length and depth; whole, or not at all."""
    if not Path(source).is_file():
        raise LpaError(f"{source} is not there; check the path")
    try:
        file = soundfile.SoundFile(str(source))
    except (soundfile.SoundFileError, OSError) as error:
        raise LpaError(f"{source} cannot be read as audio ({reason(error)}); convert it to wav or flac") from None
    level = Level(file.channels)
    try:
        with file, tempfile.TemporaryDirectory(prefix=".enhance-", dir=target.parent) as work:
            with open(Path(work) / "samples", "w+b") as store:  # the gain is known at the end only
                for part in stream(model, read(file, str(source), progress), file.samplerate, level, block, margin):
                    store.write(np.ascontiguousarray(part, "<f4").tobytes())
                store.seek(0)
                write(store, level.gain(), Path(work) / "result", target, file)
            os.replace(Path(work) / "result", target)
    except (soundfile.SoundFileError, OSError) as error:
        raise LpaError(f"{target} cannot be written ({reason(error)}); choose another form or place") from None


def read(file: soundfile.SoundFile, name: str, progress: Progress | None) -> Iterator[np.ndarray]:
    done = 0
    while True:
        try:
            piece = file.read(PIECE, dtype="float32", always_2d=True)  # (n, channels)
        except soundfile.SoundFileError as error:
            raise LpaError(f"{name} cannot be read as audio ({reason(error)}); replace it or leave it out") from None
        if not len(piece):
            break
        if not np.isfinite(piece).all():
            raise LpaError(f"{name} has samples that are not numbers (NaN or infinity); replace it or leave it out")
        done += len(piece)
        yield piece
        if progress:
            progress(done / file.samplerate)
    if not done:
        raise LpaError(f"{name} has no samples; replace it or leave it out")


def write(store: BinaryIO, gain: np.ndarray, path: Path, target: Path, like: soundfile.SoundFile) -> None:
    """Samples that were stored one after another, times their gain, as an audio file of the target's form."""
    form = FORMS[target.suffix[1:]]
    depth = like.subtype if like.subtype in DEPTHS and soundfile.check_format(form, like.subtype) else "PCM_16"
    if form == "WAV" and os.fstat(store.fileno()).st_size // 4 * DEPTHS[depth] > LARGEST_WAV:
        form = "RF64"
    with soundfile.SoundFile(path, "w", like.samplerate, like.channels, depth, format=form) as out:
        while chunk := store.read(PIECE * 4 * like.channels):
            out.write(np.frombuffer(chunk, "<f4").reshape(-1, like.channels) * gain)


def enhance_files(
    files: Sequence[str], model: str, out: Path, *, form: str | None = None, block: float = BLOCK, device: str = "cpu"
) -> int:
    """`lpa enhance`: one file each in `out`, progress and errors on stderr. How many files failed."""
    if not 0 < block < math.inf:
        raise LpaError(f"a block of {block:g} s is no block; take some seconds")
    targets = name_outputs(files, out, form)
    loaded = load(model, device)
    failed = 0
    with progress_bar(files) as bar:
        for name, target in zip(files, targets, strict=True):
            try:
                bar.begin(name, known_seconds(name))
                enhance_file(loaded, name, target, block=block, progress=bar.advance)
                print(target)
            except LpaError as error:
                failed += 1
                print(f"lpa: {error}", file=sys.stderr)
    return failed


def name_outputs(files: Sequence[str], out: Path, form: str | None) -> list[Path]:
    """Where each result goes. Whatever is wrong with that is said before any work is done."""
    if form is not None:
        choose(form, FORMS, "form")
    targets: list[Path] = []
    for name in files:
        own = Path(name).suffix[1:].lower()
        target = out / f"{Path(name).stem}.{form or (own if own in FORMS else 'wav')}"
        if target in targets:
            raise LpaError(f"{files[targets.index(target)]} and {name} would both be {target}; do them one by one")
        if target.exists() and any(Path(f).exists() and target.samefile(f) for f in files):
            raise LpaError(f"{target} is one of the files to enhance; choose another folder with -o")
        targets.append(target)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LpaError(f"{out} cannot be made a folder ({reason(error)}); choose another -o") from None
    return targets


def reason(error: Exception) -> str:
    said = getattr(error, "error_string", "") or getattr(error, "strerror", "") or str(error)
    return said.strip().rstrip(".") or type(error).__name__
