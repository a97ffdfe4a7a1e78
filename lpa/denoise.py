"""What a model that enhances is trained on and towards: pieces of speech made noisy on the device, and SI-SNR."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from . import augment, losses, noise
from .audio import RATE, to_float
from .data import AudioBank
from .errors import LpaError
from .families.base import Output, SpeechModel, own_frames
from .feed import Batch, Feed
from .losses import Part
from .recipe import TrainConfig

FLOOR = 1e-8  # of energies in the loss, against log(0)
VOICES = 4  # that talk at once in babble
HELD_OUT_SNR = 5.0  # dB of white noise in what is measured while a model trains
HELD_OUT_PIECES = 256  # at most, spread evenly over the held-out speakers


# --- the loss


def negative_si_snr(estimate: Tensor, target: Tensor, lengths: Tensor | None = None) -> Tensor:
    """(B,) dB. estimate, target (B, S); lengths (B,) own samples."""
    if estimate.shape != target.shape:
        raise LpaError(f"estimate is {tuple(estimate.shape)}, target {tuple(target.shape)}; they must be alike")
    estimate, target = estimate.float(), target.float()
    if lengths is None:
        estimate, target = (a - a.mean(-1, keepdim=True) for a in (estimate, target))
    else:
        own = own_frames(lengths, estimate.shape[1])
        count = lengths.clamp(min=1).unsqueeze(1)
        estimate, target = (torch.where(own, a, 0) for a in (estimate, target))
        estimate, target = (torch.where(own, a - a.sum(-1, keepdim=True) / count, 0) for a in (estimate, target))
    scale = (estimate * target).sum(-1, keepdim=True) / (target.square().sum(-1, keepdim=True) + FLOOR)
    wanted = scale * target
    energy, rest = wanted.square().sum(-1), (estimate - wanted).square().sum(-1)
    return -10 * torch.log10((energy + FLOOR) / (rest + FLOOR))


def objective(config: TrainConfig) -> Callable[[Output, Output | None, Batch], dict[str, tuple[float, Part]]]:
    """The losses of a recipe: negative SI-SNR against the clean audio, hidden states against the teacher's."""
    if config.kl_weight:
        raise LpaError("a model that enhances has no posteriors to compare; set kl_weight to 0")
    if not config.snr_weight and not config.hidden_weight:
        raise LpaError("every loss of a model that enhances has weight 0; set snr_weight or hidden_weight")

    def parts(student: Any, teacher: Output | None, batch: Batch) -> dict[str, tuple[float, Part]]:
        found = {}
        if config.snr_weight:
            each = negative_si_snr(student.audio, batch.targets[:, : student.audio.shape[1]])
            found["negative_si_snr"] = (config.snr_weight, Part((each * batch.weights).sum(), batch.weights.sum()))
        if teacher is not None and config.hidden_weight:
            lengths = (student.lengths, teacher.lengths)
            part = losses.hidden_error(student.hidden, teacher.hidden, *lengths, batch.weights)
            found["hidden"] = (config.hidden_weight, part)
        return found

    return parts


# --- noisy pieces


def rejecter(seconds: float) -> Callable[[str, int], str | None]:
    """A bank's `reject`: an utterance must hold one piece."""

    def reject(text: str, samples: int) -> str | None:
        if samples < round(seconds * RATE):
            return f"lasts {samples / RATE:.1f} s, less than a piece of {seconds:g}"
        return None

    return reject


def cut(bank: AudioBank, seconds: float) -> AudioBank:
    """The same audio as pieces of one length, as many as fit into each utterance: batches need no padding."""
    size = round(seconds * RATE)
    counts = bank.lengths // size
    if not counts.sum():
        raise LpaError(f"no utterance lasts {seconds:g} s; set crop_seconds lower")
    index = np.repeat(np.arange(len(bank)), counts)
    place = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its utterance
    pieces = copy.copy(bank)
    pieces.offsets = bank.offsets[index] + place * size
    pieces.lengths = np.full(len(index), size, np.int64)
    pieces.source, pieces.part = bank.source[index], bank.part[index]
    pieces.ids = [f"{bank.ids[i]}+{p}" for i, p in zip(index, place, strict=True)]
    pieces.texts, pieces.speakers = [bank.texts[i] for i in index], [bank.speakers[i] for i in index]
    return pieces


class NoisyFeed(Feed):
    """Batches whose audio is noisy and whose targets are the same audio clean."""

    def __init__(self, bank: AudioBank, device: torch.device, config: TrainConfig):
        if any(source.rescan for source in config.sources):
            raise LpaError("models that enhance are trained on what is there at the start; set rescan to false")
        if config.speed != (1.0, 1.0):
            raise LpaError("models that enhance are trained at the speed speech has; leave out speed")
        pieces = cut(bank, config.crop_seconds)
        self.size = round(config.crop_seconds * RATE)
        self.slack = np.repeat(bank.lengths % self.size, bank.lengths // self.size)  # samples a piece can begin later
        self.speaker = np.unique(pieces.speakers, return_inverse=True)[1]
        self.prepared: tuple[Tensor, Tensor] | None = None
        super().__init__(pieces, None, device, config.audio_on_device)  # type: ignore[arg-type]

    def refresh(self) -> None:
        samples = torch.from_numpy(self.bank.samples)
        self.audio = samples.to(self.device) if self._fits() else samples

    def batch(
        self,
        config: TrainConfig,
        frames: Callable[[int], int],
        around: augment.Surroundings,
        step: int,
        whole: np.ndarray,
        rank: int,
        world: int,
    ) -> Batch:
        """This process's rows of the batch `whole` (indices of pieces), with the noise that the step says."""
        rows, weights = self.share(len(whole), rank, world)
        draws = augment.draw(replace(config, noise=1.0), step, np.full(len(whole), config.crop_seconds)).rows(rows)
        rng = np.random.default_rng((config.seed, step, 1))
        kinds = rng.choice(config.noise_kinds, len(whole))[rows]
        shift = (rng.random(len(whole)) * (self.slack[whole] + 1)).astype(np.int64)[rows]
        voices = self.others(rng, whole)[rows] if "babble" in config.noise_kinds else np.zeros((len(rows), 0), np.int64)
        index = whole[rows]
        clean = self.read(self.bank.offsets[index] + shift) * _column(draws.gain, self.device)
        exponents = np.where(kinds == "coloured", np.array(augment.NOISE_COLOURS)[draws.colour], 0.0)
        added = coloured(torch.randn_like(clean), exponents)
        if (talk := np.flatnonzero(kinds == "babble")).size:
            added[torch.from_numpy(talk).to(self.device)] = self.babble(voices[talk])
        level = _column(draws.noise, self.device) * loudness(clean) / loudness(added).clamp(min=FLOOR)
        return Batch(
            audio=clean + level * added,
            lengths=None,
            frames=torch.full((len(rows),), frames(self.size)),
            targets=clean,
            target_lengths=torch.full((len(rows),), self.size),
            weights=weights,
            draws=draws,
        )

    def read(self, starts: np.ndarray) -> Tensor:
        """(B, S) float on the device: the audio from these samples on."""
        size = np.full(len(starts), self.size)
        return augment.gather(self.audio, starts, size, np.full_like(size, augment.SPEED_ONE), self.size).to(
            self.device
        )

    def others(self, rng: np.random.Generator, whole: np.ndarray) -> np.ndarray:
        """(B, VOICES) pieces of other speakers."""
        if self.speaker.max() == 0:
            raise LpaError("babble needs other speakers than the one who speaks; add some, or leave it out")
        found = rng.integers(len(self.bank), size=(len(whole), VOICES))
        while (same := self.speaker[found] == self.speaker[whole][:, None]).any():
            found[same] = rng.integers(len(self.bank), size=int(same.sum()))
        return found

    def babble(self, voices: np.ndarray) -> Tensor:
        """(B, S) of pieces (B, VOICES), each as loud as any."""
        each = self.read(self.bank.offsets[voices.ravel()])
        return (each / loudness(each).clamp(min=FLOOR)).view(*voices.shape, -1).sum(1)

    def held(self, most: float) -> Iterator[tuple[Tensor, Tensor]]:
        """What is measured on, (noisy, clean), `most` seconds at a time: the same noise in every run and everywhere."""
        if self.prepared is None:
            count = min(HELD_OUT_PIECES, len(self.bank))
            chosen = np.linspace(0, len(self.bank) - 1, count).round().astype(int)
            clean = np.stack([to_float(self.bank.clip(i)) for i in chosen])
            mixed = [noise.mix(c, noise.gaussian(self.size, (0, n)), HELD_OUT_SNR) for n, c in enumerate(clean)]
            self.prepared = torch.from_numpy(np.stack(mixed)).to(self.device), torch.from_numpy(clean).to(self.device)
        rows = max(1, int(most * RATE // self.size))
        yield from zip(*(part.split(rows) for part in self.prepared), strict=True)


def loudness(audio: Tensor) -> Tensor:
    """(B, 1) root of the mean power."""
    return audio.square().mean(-1, keepdim=True).sqrt()


def coloured(white: Tensor, exponents: np.ndarray) -> Tensor:
    """White noise (B, S) with its power falling as 1/frequency^exponent, one exponent a row."""
    if not exponents.any():
        return white
    frequency = torch.fft.rfftfreq(white.shape[1], 1 / RATE, device=white.device).clamp(min=noise.LOWEST)
    return torch.fft.irfft(torch.fft.rfft(white) * frequency ** _column(-exponents / 2, white.device), white.shape[1])


def _column(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, torch.float32, non_blocking=True).unsqueeze(1)


# --- the figure


def improvement(feed: NoisyFeed, accelerator: Accelerator, batch_seconds: float) -> Callable[[Any], dict[str, Any]]:
    """An evaluation: SI-SNRi in dB over pieces of a feed with white noise at 5 dB, shared out over the processes."""

    @torch.no_grad()
    def evaluate(model: SpeechModel) -> dict[str, Any]:
        total = torch.zeros(2, device=accelerator.device)
        batches = list(feed.held(batch_seconds))
        for noisy, clean in batches[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.autocast():
                given = model(noisy).audio  # type: ignore[attr-defined]
            wanted = clean[:, : given.shape[1]]
            gain = negative_si_snr(noisy[:, : given.shape[1]], wanted) - negative_si_snr(given, wanted)
            total += torch.stack([gain.sum(), torch.full((), float(len(gain)), device=total.device)])
        gained, count = accelerator.reduce(total).tolist()
        return {"si_snri": gained / max(count, 1), "utterances": round(count)}

    return evaluate
