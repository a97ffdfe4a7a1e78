"""Exact streaming: audio of any length in blocks, the logits of one pass, memory that does not grow. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import soxr

from . import align, audio
from .errors import LpaError
from .formats import Transcript
from .run import Listener

SHORTEST_BLOCK = 20.0  # seconds of a file that a block gives at least, where little overlap is needed
STEP = 0.64  # seconds between two looks at a live stream


def stream(
    listener: Listener, chunks: Iterable[np.ndarray], *, rate: int = audio.RATE, step: float = STEP
) -> Iterator[Transcript]:
    """Words as soon as nothing that is still to come can change them.

    chunks: arrays (S,) of any size at `rate`, int16 or floating point in [-1, 1]. step: seconds of audio between two
    looks; small steps cost more. Each piece has words, their text, and the seconds up to which all is known. The pieces
    together are what `transcribe` says of the whole.
    """
    listener.field.refuse()
    if not step > 0:
        raise LpaError(f"a step of {step:g} s is no step; take {STEP:g}, say")
    return pieces(listener, resampled(chunks, rate, listener.sample_rate), step_frames(listener, step))


def pieces(listener: Listener, chunks: Iterable[np.ndarray], size: int) -> Iterator[Transcript]:
    blocks, words = Blocks(listener, size), Words(listener)

    def take(heard: Iterable[np.ndarray]) -> Iterator[Transcript]:
        for logits in heard:
            if found := words.push(logits):  # the last frame may end after the recording
                yield said(found, min(words.frames / listener.frame_rate, blocks.count / listener.sample_rate))

    for samples in chunks:
        yield from take(blocks.push(samples))
    yield from take(blocks.finish())
    if found := words.finish():
        yield said(found, blocks.count / listener.sample_rate)


def said(words: tuple[align.Word, ...], seconds: float) -> Transcript:
    return Transcript(" ".join(word.word for word in words), words, seconds)


def step_frames(listener: Listener, seconds: float) -> int:
    """Whole grids of frames, the fewest that last so long."""
    grid = listener.field.grid
    return max(1, -(-round(seconds * listener.frame_rate) // grid)) * grid


def file_frames(listener: Listener) -> int:
    """Frames that a block of a file gives: four times what is computed beside them where memory allows, or as many."""
    field, overlap = listener.field, listener.field.overlap
    fitting = listener.room / listener.facts.frame_bytes - overlap
    wanted = max(4 * overlap, SHORTEST_BLOCK * listener.frame_rate)
    return -(-int(max(overlap, min(wanted, fitting), 1)) // field.grid) * field.grid


class Blocks:
    """A recording that comes in pieces, heard a block at a time: just what a block's frames depend on is beside it."""

    def __init__(self, listener: Listener, size: int):
        """size: frames that a block gives."""
        listener.field.refuse()
        self.listener, self.field, self.size = listener, listener.field, size
        self.waiting: list[np.ndarray] = []  # samples from frame `start` on
        self.count = 0  # samples that have come
        self.start = 0  # frame that the waiting samples begin with, on the grid
        self.given = 0  # frames that have been given

    def push(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """More samples (S,) → logits (size, V) of every block that they complete."""
        self.waiting.append(samples)
        self.count += len(samples)
        while self.count >= self.samples(self.field.needs(self.given, self.given + self.size)[1]):
            yield self.hear(self.size)

    def finish(self) -> Iterator[np.ndarray]:
        """There is no more → the logits (T, V) that are left."""
        if self.given == 0 or self.count - self.start * self.field.stride >= self.listener.facts.shortest:
            yield self.hear(None)

    def samples(self, frames: int) -> int:
        """Samples that make so many frames."""
        return frames * self.field.stride + self.field.tail

    def hear(self, size: int | None) -> np.ndarray:
        """The next frames, so many or all that are left; what none of the later ones depends on is dropped."""
        stride = self.field.stride
        heard = self.waiting[0] if len(self.waiting) == 1 else np.concatenate([np.empty(0, np.float32), *self.waiting])
        stop = None
        if size is not None:
            stop = self.samples(self.field.needs(self.given, self.given + size)[1]) - self.start * stride
        logits = self.listener.hear(heard[:stop])[self.given - self.start :][:size]
        self.given += len(logits)
        start = max(0, self.field.needs(self.given, self.given + 1)[0])
        self.waiting = [heard[(start - self.start) * stride :].copy()]  # a view would keep the rest in memory
        self.start = start
        return logits


class Words:
    """Words from logits that come in pieces: a word is sure once the gap after it is."""

    def __init__(self, listener: Listener):
        self.tokens, self.frame_rate = listener.tokens, listener.frame_rate
        self.gap = self.tokens.symbols.index(self.tokens.word_gap)
        self.waiting: list[np.ndarray] = []  # logits since the last gap
        self.frames = 0  # all that have come
        self.start = 0  # frame that the waiting logits begin with

    def push(self, logits: np.ndarray) -> tuple[align.Word, ...]:
        """More logits (T, V) → the words that are sure now."""
        self.frames += len(logits)
        labels = logits.argmax(-1)
        gaps = np.flatnonzero(labels == self.gap)
        found: tuple[align.Word, ...] = ()
        if len(gaps):
            end = int(gaps[-1]) + 1
            self.waiting.append(logits[:end])
            found = self.finish()
            logits, labels = logits[end:], labels[end:]
        if not self.waiting:  # silence before a word is no part of it, and may last
            heard = np.flatnonzero(labels != self.tokens.blank)
            logits = logits[int(heard[0]) if len(heard) else len(logits) :]
            self.start = self.frames - len(logits)
        if len(logits):
            self.waiting.append(logits.copy())
        return found

    def finish(self) -> tuple[align.Word, ...]:
        """The words in all that waits."""
        if not self.waiting:
            return ()
        logits = np.concatenate(self.waiting)
        self.waiting = []
        words = align.words(logits, self.tokens, 1.0)  # in frames from the start of these logits
        return tuple(
            replace(
                word, start=(word.start + self.start) / self.frame_rate, end=(word.end + self.start) / self.frame_rate
            )
            for word in words
        )


# --- samples


def checked(samples: np.ndarray) -> np.ndarray:
    """Samples (S,) as float32, or an error that says what they must be."""
    if not isinstance(samples, np.ndarray) or samples.ndim != 1:
        shape = getattr(samples, "shape", type(samples).__name__)
        raise LpaError(f"audio is {shape}; it must be a numpy array (samples,): one channel")
    if samples.dtype == np.int16:
        return audio.to_float(samples)
    if not np.issubdtype(samples.dtype, np.floating) or not np.isfinite(samples).all():
        raise LpaError(f"audio is {samples.dtype}; it must be int16, or finite numbers in [-1, 1]")
    return np.ascontiguousarray(samples, np.float32)


def resampled(chunks: Iterable[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    """Chunks at `wanted` samples a second: as one resampling of the whole, whatever their sizes."""
    if rate == wanted:
        yield from map(checked, chunks)
        return
    resampler = soxr.ResampleStream(rate, wanted, 1, dtype="float32")
    for samples in chunks:
        yield resampler.resample_chunk(checked(samples))
    yield resampler.resample_chunk(np.empty(0, np.float32), last=True)
