"""Augmentation: what is drawn for a batch, and what is done to its audio and features, on the device they are on.

All randomness of a batch is drawn at once from (seed, step), one row an utterance: a resumed run draws the same, and so
does every one of several processes, each of which keeps its own rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .noise import coloured, room
from .recipe import TrainConfig

SPEED_ONE = 4096  # speeds are whole multiples of 1/4096, so that positions in the audio are exact integers
NOISE_COLOURS = (0.0, 0.5, 1.0, 1.5, 2.0)  # the power falls with frequency to this power: white, pink (1), brown (2)
NOISE_SAMPLES = 1 << 18
ROOMS, ROOM_SAMPLES = 128, 4096


@dataclass(frozen=True)
class Draws:
    """One row an utterance (B, ...); what is 1, 0 or of no width changes nothing."""

    speed: np.ndarray  # (B,) int64, in 1/4096
    gain: np.ndarray  # (B,) factor
    noise: np.ndarray  # (B,) amplitude against the speech's
    colour: np.ndarray  # (B,) int64
    offset: np.ndarray  # (B,) int64, where in the noise it begins
    room: np.ndarray  # (B,) int64; 0: none
    time_masks: np.ndarray  # (B, K, 2) start and width, as shares of the utterance
    feature_masks: np.ndarray  # (B, M, 2) start and width, as shares of the channels

    def rows(self, index: np.ndarray) -> Draws:
        return Draws(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    def twice(self) -> Draws:
        """For the rows of a batch heard twice: its utterances keep their speed, so that the frames are the same."""
        half = len(self.speed) // 2
        return dataclasses.replace(self, speed=np.tile(self.speed[:half], 2))

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """(B,) samples left of that many once the speed has changed."""
        return (samples - 1) * SPEED_ONE // self.speed + 1


def draw(config: TrainConfig, step: int, seconds: np.ndarray) -> Draws:
    """Draw for a whole batch, `seconds` (B,) long, over all processes."""
    rng = np.random.default_rng((config.seed, step))
    batch = len(seconds)
    speed = np.rint(rng.uniform(*config.speed, batch) * SPEED_ONE).astype(np.int64)
    speed = np.maximum(speed, np.ceil(seconds / config.max_seconds * SPEED_ONE).astype(np.int64))
    gain = 10 ** (rng.uniform(*config.gain_db, batch) / 20)
    snr = rng.uniform(*config.noise_snr_db, batch)
    noise = np.where(rng.random(batch) < config.noise, 10 ** (-snr / 20), 0.0)
    colour = rng.integers(len(NOISE_COLOURS), size=batch)
    offset = rng.integers(NOISE_SAMPLES, size=batch)
    wanted = config.time_masks * seconds / 10
    counts = np.floor(wanted + rng.random(batch)).astype(np.int64)
    widths = np.minimum(config.time_mask_seconds / np.maximum(seconds, 1e-3), 0.5)  # (B,) of a short one, half at most
    masks = _masks(rng, widths, int(counts.max(initial=0)))
    masks[np.arange(masks.shape[1]) >= counts[:, None]] = 0
    features = _masks(rng, np.full(batch, config.feature_mask_share), config.feature_masks)
    rooms = np.where(rng.random(batch) < config.room, rng.integers(1, ROOMS + 1, size=batch), 0)
    return Draws(speed, gain, noise, colour, offset, rooms, masks, features)


def _masks(rng: np.random.Generator, widest: np.ndarray, count: int) -> np.ndarray:
    """(B, count, 2): start and width of masks up to `widest` (B,) wide, all within 0 … 1."""
    width = rng.random((len(widest), count)) * widest[:, None]
    return np.stack([rng.random((len(widest), count)) * (1 - width), width], -1)


def gather(audio: Tensor, starts: np.ndarray, lengths: np.ndarray, speed: np.ndarray, size: int) -> Tensor:
    """Utterances out of one flat int16 tensor, played at their speeds and zero-padded: (B, size) float in -1 … 1.

    starts, lengths (B,): where each begins and how long it is in `audio`. Between samples: a cubic (Catmull-Rom) curve,
    which is the sample itself wherever a position is whole.
    """
    start, length, pace = (_column(x, audio.device, torch.int64) for x in (starts, lengths, speed))  # (B, 1)
    position = torch.arange(size, device=audio.device) * pace  # (B, size)
    whole = position >> (SPEED_ONE.bit_length() - 1)

    def read(shift: int) -> Tensor:
        index = (whole + shift).clamp_(min=0).minimum(length - 1)
        return audio[index + start].float() / 32768

    curve = b = read(0)
    if (speed != SPEED_ONE).any():
        f = (position & (SPEED_ONE - 1)).float() / SPEED_ONE
        a, c, d = read(-1), read(1), read(2)
        curve = b + 0.5 * f * (c - a + f * (2 * a - 5 * b + 4 * c - d + f * (3 * (b - c) + d - a)))
    return curve.masked_fill_(position > (length - 1) * SPEED_ONE, 0)


class Surroundings(NamedTuple):
    """What audio is perturbed with."""

    noise: Tensor  # (colours, NOISE_SAMPLES) of unit power; each row goes on at its start when it ends
    rooms: Tensor  # (ROOMS, ROOM_SAMPLES) impulse responses of unit power


def surroundings(seed: int, device: torch.device) -> Surroundings:
    noise = [coloured(NOISE_SAMPLES, exponent, (seed, row)) for row, exponent in enumerate(NOISE_COLOURS)]
    rooms = [room(ROOM_SAMPLES, (seed, row)) for row in range(ROOMS)]
    return Surroundings(*(torch.from_numpy(np.stack(rows)).to(device) for rows in (noise, rooms)))


def perturb(audio: Tensor, lengths: Tensor, draws: Draws, around: Surroundings) -> Tensor:
    """Speech (B, S) in its room, with noise at its level against it, at its gain; the padding stays zero."""
    if not draws.noise.any() and not draws.room.any() and (draws.gain == 1).all():
        return audio
    place = torch.arange(audio.shape[1], device=audio.device)
    gain, level = (_column(x, audio.device, torch.float32) for x in (draws.gain, draws.noise))
    if draws.room.any():
        audio = in_rooms(audio, _column(draws.room, audio.device, torch.int64), around.rooms)
    if draws.noise.any():
        offset, colour = (_column(x, audio.device, torch.int64) for x in (draws.offset, draws.colour))
        noise = around.noise[colour, (place + offset) % NOISE_SAMPLES]  # (B, S)
        loudness = (audio.square().sum(1) / lengths).sqrt().unsqueeze(1)
        audio = audio + noise * (loudness * level)
    return (audio * gain).masked_fill_(place >= lengths.unsqueeze(1), 0)


def in_rooms(audio: Tensor, numbers: Tensor, rooms: Tensor) -> Tensor:
    """Audio (B, S) convolved with the impulse responses of rooms `numbers` (B, 1), counted from 1; 0: as it is."""
    # no end comes round to the start, and the transform's length has small factors
    size = -(-(audio.shape[1] + rooms.shape[1]) // rooms.shape[1]) * rooms.shape[1]
    responses = rooms[(numbers.squeeze(1) - 1).clamp(min=0)]
    heard = torch.fft.irfft(torch.fft.rfft(audio, size) * torch.fft.rfft(responses, size), size)[:, : audio.shape[1]]
    return torch.where(numbers > 0, heard, audio)


def mask_features(features: Tensor, lengths: Tensor, draws: Draws) -> Tensor:
    """SpecAugment: masked frames and channels become the mean of the utterance's own; the padding stays as it is."""
    if not draws.time_masks.size and not draws.feature_masks.size:
        return features
    _, frames, channels = features.shape
    place = torch.arange(frames, device=features.device)
    own = place < lengths.unsqueeze(1)  # (B, T)
    mean = (features * own.unsqueeze(-1)).sum((1, 2)) / (lengths * channels)  # (B,)
    masked = _covered(draws.time_masks, place, lengths).unsqueeze(-1)  # (B, T, 1)
    widths = torch.full_like(lengths, channels)
    masked = masked | _covered(draws.feature_masks, torch.arange(channels, device=features.device), widths).unsqueeze(1)
    return torch.where(masked & own.unsqueeze(-1), mean.to(features.dtype)[:, None, None], features)


def _covered(masks: np.ndarray, place: Tensor, lengths: Tensor) -> Tensor:
    """(B, T) bool: the places that a mask covers; masks (B, K, 2) are shares of lengths (B,)."""
    edges = torch.from_numpy(masks.astype(np.float32)).to(place.device, non_blocking=True) * lengths[:, None, None]
    start = edges[..., 0].floor().unsqueeze(-1)  # (B, K, 1)
    stop = start + edges[..., 1].round().unsqueeze(-1)
    return ((place >= start) & (place < stop)).any(1)


def _column(values: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(B, 1) on the device."""
    return torch.from_numpy(values).to(device, dtype, non_blocking=True).unsqueeze(1)
