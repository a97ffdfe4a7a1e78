"""From a bank of utterances to batches on the training device: gathered, augmented and padded there.

A feed may keep what a frozen front end makes of every utterance; its batches then hold that instead of audio.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import augment
from .audio import RATE
from .data import AudioBank, bucket
from .errors import LpaError
from .families.base import Output, SpeechModel, own_frames
from .recipe import TrainConfig
from .tokens import Tokens


@dataclass
class Batch:
    """This process's rows of a batch, on its device."""

    audio: Tensor  # (B, S) float; where the feed keeps a front end's output, that: (B, T', C)
    lengths: Tensor | None  # (B,) samples, or frames of it; None: no row is padded
    frames: Tensor  # (B,) the model's frames; on the CPU, where CTC wants them
    targets: Tensor  # (B, L) token ids; where a model is to enhance, (B, S) clean audio
    target_lengths: Tensor  # (B,), on the CPU
    weights: Tensor  # (B,) 0 for a row that only keeps a process company
    draws: augment.Draws


@dataclass
class Kept:
    """What a front end has made of every utterance, one after the other: values (F, C), float16 on the device."""

    values: Tensor
    starts: np.ndarray  # (N,)
    lengths: np.ndarray  # (N,) frames

    def gather(self, index: np.ndarray, least: int = 0) -> tuple[Tensor, Tensor]:
        """(B, T', C) float32, blank past an utterance's end, T' as long as the longest and `least`; own frames (B,)."""
        device, lengths = self.values.device, self.lengths[index]
        own = torch.from_numpy(lengths).to(device, non_blocking=True)
        start = torch.from_numpy(self.starts[index]).to(device, non_blocking=True).unsqueeze(1)
        frames = max(least, int(lengths.max()))
        place = torch.arange(frames, device=device).minimum((own - 1).clamp(min=0).unsqueeze(1))  # (B, T')
        mask = own_frames(own, frames).unsqueeze(-1)
        return self.values[start + place].float().masked_fill(~mask, 0), own


def hear(model: SpeechModel, audio: Tensor, lengths: Any, hidden: bool = False) -> Output:
    """A model's output for audio (B, S), or for what its front end has made of it (B, T', C), as a feed gives them."""
    return (model.encode if audio.dim() == 3 else model)(audio, lengths, hidden=hidden)


class Feed:
    """A bank's audio and transcripts as tensors, and the batches gathered from them without a wait for the device."""

    def __init__(self, bank: AudioBank, tokens: Tokens, device: torch.device, on_device: str = "auto"):
        self.bank, self.tokens, self.device, self.on_device = bank, tokens, device, on_device
        self.audio = torch.empty(0, dtype=torch.int16)
        self.targets = torch.empty(0, dtype=torch.int64)
        self.target_lengths = np.zeros(0, np.int64)
        self.kept: Kept | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take in what has joined the bank; only that is copied to the device."""
        self.kept = None  # it lacks what has joined
        home = self.device if self._fits() else torch.device("cpu")
        new = torch.from_numpy(self.bank.samples[len(self.audio) :])
        self.audio = torch.cat([self.audio.to(home), new.to(home)])
        ids = [self.tokens.encode(text) for text in self.bank.texts[len(self.target_lengths) :]]
        flat = torch.tensor([i for row in ids for i in row], dtype=torch.int64)
        self.targets = torch.cat([self.targets.to(self.device), flat.to(self.device)])
        self.target_lengths = np.concatenate([self.target_lengths, np.array([len(row) for row in ids], np.int64)])
        self.target_starts = np.cumsum(self.target_lengths) - self.target_lengths

    def _fits(self) -> bool:
        if self.on_device != "auto" or self.device.type != "cuda":
            return self.on_device != "no"
        # what the allocator only keeps for later is free
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        fits = 2 * self.bank.samples.nbytes < torch.cuda.mem_get_info(self.device)[0] + kept  # growing needs a copy
        if not fits and self.audio.device.type == "cuda":
            warnings.warn("the GPU has no room left for all audio; it is read from memory now, slower", stacklevel=2)
        return fits

    @torch.no_grad()
    def keep_front(self, model: SpeechModel, most: int, batch_seconds: float = 400.0) -> int:
        """Run the front end over every utterance, once; the bytes that takes. More than `most` is an error.

        From then on batches hold its output. They are for models with this very front end, and for audio as it is.
        """
        lengths = np.zeros(len(self.bank), np.int64)
        parts: list[Tensor] = []
        order = bucket(self.bank.lengths, batch_seconds * RATE, np.random.default_rng(0), jitter=0.0)
        for index in order:
            features, own = model.front(*self.clean(index))
            parts.append(features[own_frames(own, features.shape[1])].half())  # (frames of all of them, C)
            lengths[index] = own.cpu().numpy()
            size = parts[0].nbytes / self.bank.lengths[order[0]].sum() * self.bank.lengths.sum()
            if size > most:
                raise LpaError(f"the front end's output takes {size / 2**30:.3g} GB of memory; allow it, or keep none")
        whole = np.concatenate(order)
        starts = np.zeros_like(lengths)
        starts[whole] = np.cumsum(lengths[whole]) - lengths[whole]
        self.kept = Kept(torch.cat(parts), starts, lengths)
        if not self.kept.values.isfinite().all():
            raise LpaError("the front end's output does not fit 16 bits, so it cannot be kept")
        return self.kept.values.nbytes

    def clean(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Utterances as they are: audio (B, S), lengths (B,); or what is kept of them, as in a Batch."""
        if self.kept is not None:
            return self.kept.gather(index)
        lengths = self.bank.lengths[index]
        speed = np.full(len(index), augment.SPEED_ONE)
        audio = augment.gather(self.audio, self.bank.offsets[index], lengths, speed, int(lengths.max()))
        return audio.to(self.device), torch.from_numpy(lengths).to(self.device)

    def batch(
        self,
        config: TrainConfig,
        frames: Callable[[Any], Any],
        around: augment.Surroundings,
        step: int,
        whole: np.ndarray,
        rank: int,
        world: int,
    ) -> Batch:
        """This process's rows of the batch `whole` (indices into the bank), augmented as the step says."""
        rows, weights = self.share(len(whole), rank, world)
        if config.consistency_weight:  # all of it twice, one after the other
            rows, weights, whole = np.concatenate([rows, rows + len(whole)]), weights.repeat(2), np.tile(whole, 2)
        draws = augment.draw(config, step, self.bank.lengths[whole] / RATE)
        draws = (draws.twice() if config.consistency_weight else draws).rows(rows)
        index = whole[rows]
        samples = draws.lengths(self.bank.lengths[index])
        audio, lengths = self._heard(config, frames, index, samples, draws, around)
        return Batch(
            audio=audio,
            lengths=lengths,
            frames=frames(torch.from_numpy(samples)),
            targets=self._targets(index),
            target_lengths=torch.from_numpy(self.target_lengths[index]),
            weights=weights,
            draws=draws,
        )

    def share(self, count: int, rank: int, world: int) -> tuple[np.ndarray, Tensor]:
        """Which rows of a batch of so many are this process's, and what each counts."""
        rows = np.arange(count)[rank::world]
        if not len(rows):  # fewer than there are processes: hear one, count none
            return np.zeros(1, np.int64), torch.zeros(1, device=self.device)
        return rows, torch.ones(len(rows), device=self.device)

    def _heard(
        self,
        config: TrainConfig,
        frames: Callable[[Any], Any],
        index: np.ndarray,
        samples: np.ndarray,
        draws: augment.Draws,
        around: augment.Surroundings,
    ) -> tuple[Tensor, Tensor]:
        """A batch's audio and lengths: `samples` (B,) are what is left of each once the speed has changed."""
        step_samples = round(config.pad_seconds * RATE)
        size = max(
            int(samples.max()),
            min(-(-int(samples.max()) // step_samples) * step_samples, round(config.max_seconds * RATE)),
        )
        if self.kept is not None:
            changed = draws.noise.any() or draws.room.any() or (draws.gain != 1).any()
            if changed or (samples != self.bank.lengths[index]).any():
                raise LpaError("what a front end made of plain audio is kept; turn speed, noise, room and gain_db off")
            ratio = round(self.kept.lengths.max() / frames(int(self.bank.lengths.max())))  # Whisper's are two a frame
            return self.kept.gather(index, ratio * frames(size))
        audio = augment.gather(self.audio, self.bank.offsets[index], self.bank.lengths[index], draws.speed, size)
        audio, lengths = audio.to(self.device), torch.from_numpy(samples).to(self.device, non_blocking=True)
        return augment.perturb(audio, lengths, draws, around), lengths

    def _targets(self, index: np.ndarray) -> Tensor:
        """(B, L) token ids; what lies past a transcript's end is never read."""
        places = self.target_starts[index][:, None] + np.arange(self.target_lengths[index].max())
        return self.targets[
            torch.from_numpy(places).clamp_(max=len(self.targets) - 1).to(self.device, non_blocking=True)
        ]
