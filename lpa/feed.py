"""From a bank of utterances to batches on the training device: gathered, augmented and padded there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import augment
from .audio import RATE
from .data import AudioBank
from .recipe import TrainConfig
from .tokens import Tokens


@dataclass
class Batch:
    """This process's rows of a batch, on its device."""

    audio: Tensor  # (B, S) float
    lengths: Tensor  # (B,) samples
    frames: Tensor  # (B,) the model's frames; on the CPU, where CTC wants them
    targets: Tensor  # (B, L) token ids
    target_lengths: Tensor  # (B,), on the CPU
    weights: Tensor  # (B,) 0 for a row that only keeps a process company
    draws: augment.Draws


class Feed:
    """A bank's audio and transcripts as tensors, and the batches gathered from them without a wait for the device."""

    def __init__(self, bank: AudioBank, tokens: Tokens, device: torch.device, on_device: str = "auto"):
        self.bank, self.tokens, self.device, self.on_device = bank, tokens, device, on_device
        self.audio = torch.empty(0, dtype=torch.int16)
        self.targets = torch.empty(0, dtype=torch.int64)
        self.target_lengths = np.zeros(0, np.int64)
        self.refresh()

    def refresh(self) -> None:
        """Take in what has joined the bank; only that is copied to the device."""
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
        return 2 * self.bank.samples.nbytes < torch.cuda.mem_get_info(self.device)[0]  # growing needs room for a copy

    def clean(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Utterances as they are: audio (B, S), lengths (B,)."""
        lengths = self.bank.lengths[index]
        speed = np.full(len(index), augment.SPEED_ONE)
        audio = augment.gather(self.audio, self.bank.offsets[index], lengths, speed, int(lengths.max()))
        return audio.to(self.device), torch.from_numpy(lengths).to(self.device)

    def batch(
        self,
        config: TrainConfig,
        frames: Callable[[int], int],
        noise: Tensor,
        step: int,
        whole: np.ndarray,
        rank: int,
        world: int,
    ) -> Batch:
        """This process's rows of the batch `whole` (indices into the bank), augmented as the step says."""
        rows = np.arange(len(whole))[rank::world]
        weights = torch.ones(max(1, len(rows)), device=self.device)
        if not len(rows):  # fewer utterances than processes: hear one, count none
            rows, weights = np.zeros(1, np.int64), weights * 0
        draws = augment.draw(config, step, self.bank.lengths[whole] / RATE).rows(rows)
        index = whole[rows]
        samples = draws.lengths(self.bank.lengths[index])
        step_samples = round(config.pad_seconds * RATE)
        size = max(
            int(samples.max()),
            min(-(-int(samples.max()) // step_samples) * step_samples, round(config.max_seconds * RATE)),
        )
        audio = augment.gather(self.audio, self.bank.offsets[index], self.bank.lengths[index], draws.speed, size)
        audio, lengths = audio.to(self.device), torch.from_numpy(samples).to(self.device, non_blocking=True)
        return Batch(
            audio=augment.perturb(audio, lengths, draws, noise),
            lengths=lengths,
            frames=torch.tensor([frames(int(n)) for n in samples]),
            targets=self._targets(index),
            target_lengths=torch.from_numpy(self.target_lengths[index]),
            weights=weights,
            draws=draws,
        )

    def _targets(self, index: np.ndarray) -> Tensor:
        """(B, L) token ids; what lies past a transcript's end is never read."""
        places = self.target_starts[index][:, None] + np.arange(self.target_lengths[index].max())
        return self.targets[
            torch.from_numpy(places).clamp_(max=len(self.targets) - 1).to(self.device, non_blocking=True)
        ]
