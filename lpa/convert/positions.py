"""A student without position embedding, and what a teacher with one may ask of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..families.base import Output, own_frames
from ..feed import hear
from ..losses import Part
from ..task import Objective

RIDGE = 1e-3  # of the embedding's own variance


@torch.no_grad()
def told_by_position(teacher: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What a frame's position alone says of a teacher's hidden states: (layers, positions, D), of mean 0.

    A ridge regression of them, over all own frames, on the position embedding, whose waves can draw any smooth course.
    Of Whisper's first layers it is most of the variance, which a model without positions can never match.
    """
    table = teacher.encoder.embed_positions.weight.double()  # (N, D)
    counts = table.new_zeros(len(table))
    sums = table.new_zeros(len(teacher.encoder.layers), *table.shape)
    for audio, lengths in batches:
        output = hear(teacher, audio, lengths, hidden=True)
        own = own_frames(output.lengths, output.last.shape[1]).unsqueeze(-1)  # (B, T, 1)
        frames = own.shape[1]
        counts[:frames] += own.sum((0, 2))
        for total, hidden in zip(sums, output.hidden, strict=True):
            total[:frames] += (hidden.double() * own).sum(0)
    waves = table - (counts @ table) / counts.sum()
    away = sums - counts.unsqueeze(-1) * sums.sum(1, keepdim=True) / counts.sum()  # (L, N, D)
    gram = waves.T @ (counts.unsqueeze(-1) * waves)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return (waves @ torch.linalg.solve(gram, waves.T @ away)).float()


def without_positions(loss: Objective, model: Any, told: Tensor) -> Objective:
    """A loss whose teacher's hidden states lack what position told, as far as the model's own embedding has faded."""

    def parts(student: Output, teacher: Output | None, batch: Any) -> dict[str, tuple[float, Part]]:
        if teacher is not None:
            gone = 1 - model.fading
            states = [h - gone * t[: h.shape[1]] for h, t in zip(teacher.hidden, told, strict=False)]
            teacher = replace(teacher, hidden=states)
        return loss(student, teacher, batch)

    return parts
