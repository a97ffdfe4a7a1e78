"""A student without position embedding, and what a teacher with one may ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..families.base import Output, own_frames
from ..feed import hear
from ..losses import Part
from ..mixers.base import Projections, projections
from ..surgery import find_site, mixer_at, swap
from ..task import Objective

RIDGE = 1e-3  # of the embedding's own variance
REACH = 400  # frames either side whose distance is told apart


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


@torch.no_grad()
def scores_of_distances(model: Any, other: Any, heard: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What position tells a model's attention, as a score for every distance: (H, 2·REACH + 1) a layer.

    Without positions attention lacks, at each distance, on average so much of the score it had. Layer by layer from the
    first, as each is heard through those below that have their scores already. `other`: a copy of the model to work on.
    """
    other.drop_positions()
    found = []
    for index in range(len(model.sites())):
        source = projections(mixer_at(model, index))
        there, here = (average_scores(m, index, source, heard) for m in (model, other))
        found.append(there - here)
        swap(other, index, "window", {"side": REACH, "places": True})
        mixer_at(other, index).add_places(found[-1])
    return found


def average_scores(model: Any, index: int, source: Projections, heard: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """(H, 2·REACH + 1): a layer's mean score, less each frame's own mean, at every distance; farther ones are REACH."""
    total = torch.zeros(source.heads, 2 * REACH + 1, dtype=torch.float64)
    count = torch.zeros(2 * REACH + 1, dtype=torch.float64)
    for audio, lengths in heard:
        with inputs_of(model, index) as inputs:
            own = hear(model, audio, lengths).lengths.tolist()
        for x, frames in zip(inputs[0].float(), own, strict=True):
            q, k = (p(x[:frames]).unflatten(-1, (source.heads, -1)).transpose(0, 1) for p in (source.q, source.k))
            scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5  # (H, T, T)
            sums = diagonal_sums(scores - scores.mean(-1, keepdim=True)).double().cpu()
            distance = torch.arange(1 - frames, frames)
            place = distance.clamp(-REACH, REACH) + REACH
            total.index_add_(1, place, sums)
            count.index_add_(0, place, (frames - distance.abs()).double())
    return (total / count.clamp(min=1)).float().to(source.q.weight.device)


def diagonal_sums(scores: Tensor) -> Tensor:
    """Sums over the diagonals of (H, T, T), from the lower left to the upper right: (H, 2T − 1)."""
    frames = scores.shape[-1]
    flat = F.pad(F.pad(scores, (0, frames)).flatten(1), (0, frames))  # cut one later, each row slips back by one
    sums = flat.view(len(scores), frames, 2 * frames + 1).sum(1)
    return torch.cat([sums[:, frames + 2 :], sums[:, :frames]], 1)


@contextmanager
def inputs_of(model: Any, index: int) -> Iterator[list[Tensor]]:
    """Inside, what the mixer or attention of a layer is given is put into a list."""
    seen: list[Tensor] = []

    def hook(_: Any, args: tuple, kwargs: dict) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    handle = model.net.get_submodule(find_site(model, index).path).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def without_positions(loss: Objective, model: Any, told: Tensor) -> Objective:
    """A loss whose teacher's hidden states lack what position told, as far as the model's own embedding has faded."""

    def parts(student: Output, teacher: Output | None, batch: Any) -> dict[str, tuple[float, Part]]:
        if teacher is not None:
            gone = 1 - model.fading
            states = [h - gone * t[: h.shape[1]] for h, t in zip(teacher.hidden, told, strict=False)]
            teacher = replace(teacher, hidden=states)
        return loss(student, teacher, batch)

    return parts
