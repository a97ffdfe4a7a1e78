"""What a model is trained for, and judged by: words against a transcript, or clean audio out of noisy audio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from . import augment, data, denoise, losses, score
from .audio import RATE
from .data import AudioBank, Reject, bucket
from .errors import LpaError
from .families.base import Output, SpeechModel
from .feed import Batch, Feed, hear
from .recipe import TrainConfig
from .score import MEASURES, Measure

Objective = Callable[[Output, Output | None, Batch], dict[str, tuple[float, losses.Part]]]
Evaluation = Callable[[SpeechModel], dict[str, Any]]


class Task(ABC):
    measure: Measure

    @abstractmethod
    def rejecter(self, model: SpeechModel, config: TrainConfig) -> Reject:
        """Why an utterance (text, samples) cannot be used, or None."""

    @abstractmethod
    def feed(self, model: SpeechModel, bank: AudioBank, device: torch.device, config: TrainConfig) -> Any:
        """Batches of a bank."""

    @abstractmethod
    def objective(self, config: TrainConfig, model: SpeechModel) -> Objective:
        """The losses of a recipe."""

    @abstractmethod
    def evaluation(self, feed: Any, accelerator: Accelerator, batch_seconds: float) -> Evaluation:
        """The measure over the utterances of a feed, shared out over the processes."""


class Transcription(Task):
    measure = MEASURES["wer"]

    def rejecter(self, model: SpeechModel, config: TrainConfig) -> Reject:
        fastest = max(augment.SPEED_ONE, round(config.speed[1] * augment.SPEED_ONE))
        fewest = lambda samples: model.frames((samples - 1) * augment.SPEED_ONE // fastest + 1)  # noqa: E731
        return data.rejecter(model.tokens, fewest, config.max_seconds)

    def feed(self, model: SpeechModel, bank: AudioBank, device: torch.device, config: TrainConfig) -> Feed:
        return Feed(bank, model.tokens, device, config.audio_on_device)

    def objective(self, config: TrainConfig, model: SpeechModel) -> Objective:
        """CTC against the transcript; KL, hidden states and what the head reads against the teacher."""

        def parts(student: Output, teacher: Output | None, batch: Batch) -> dict[str, tuple[float, losses.Part]]:
            found = {}
            if student.logits is None:
                raise LpaError("the model has no CTC head to train; import or create it with one")
            if config.ctc_weight:
                told = (batch.frames, batch.targets, batch.target_lengths)
                part = losses.ctc(student.logits, *told, model.tokens.blank, batch.weights)
                found["ctc"] = (config.ctc_weight, part)
            if config.consistency_weight:
                part = losses.consistency(student.logits, student.lengths, batch.weights)
                found["consistency"] = (config.consistency_weight, part)
            if teacher is None:
                return found
            lengths = (student.lengths, teacher.lengths)
            if config.kl_weight:
                if teacher.logits is None or teacher.logits.shape[-1] != student.logits.shape[-1]:
                    raise LpaError("teacher and student have different alphabets; choose a teacher with the student's")
                part = losses.posterior_kl(student.logits, teacher.logits, *lengths, config.temperature, batch.weights)
                found["kl"] = (config.kl_weight, part)
            if config.hidden_weight:
                part = losses.hidden_error(student.hidden, teacher.hidden, *lengths, batch.weights)
                found["hidden"] = (config.hidden_weight, part)
            if config.reading_weight:
                part = losses.reading_error(student.last, teacher.last, *lengths, batch.weights)
                found["reading"] = (config.reading_weight, part)
            return found

        return parts

    def evaluation(self, feed: Feed, accelerator: Accelerator, batch_seconds: float) -> Evaluation:
        """Greedy WER in per cent."""
        bank = feed.bank
        plan = bucket(bank.lengths, batch_seconds * RATE, np.random.default_rng(0), jitter=0.0)

        @torch.no_grad()
        def evaluate(model: SpeechModel) -> dict[str, Any]:
            pairs = []
            for index in plan[accelerator.process_index :: accelerator.num_processes]:
                with accelerator.autocast():
                    output = hear(model, *feed.clean(index))
                assert output.logits is not None
                best, lengths = output.logits.argmax(-1).cpu(), output.lengths.tolist()
                texts = [model.tokens.decode(row[:n].tolist()) for row, n in zip(best, lengths, strict=True)]
                pairs += [(bank.texts[i].split(), text.split()) for i, text in zip(index, texts, strict=True)]
            counts = [int(score.distances(pairs).sum()), sum(len(words) for words, _ in pairs), len(pairs)]
            total = accelerator.reduce(torch.tensor(counts, device=accelerator.device))
            errors, words, utterances = total.tolist()
            return {"wer": 100 * errors / max(words, 1), "utterances": utterances}

        return evaluate


class Enhancement(Task):
    measure = MEASURES["si_snri"]

    def rejecter(self, model: SpeechModel, config: TrainConfig) -> Reject:
        return denoise.rejecter(config.crop_seconds)

    def feed(self, model: SpeechModel, bank: AudioBank, device: torch.device, config: TrainConfig) -> Any:
        return denoise.NoisyFeed(bank, device, config)

    def objective(self, config: TrainConfig, model: SpeechModel) -> Objective:
        if config.consistency_weight:
            raise LpaError("consistency_weight is for models that transcribe; set it to 0")
        return denoise.objective(config)

    def evaluation(self, feed: Any, accelerator: Accelerator, batch_seconds: float) -> Evaluation:
        return denoise.improvement(feed, accelerator, batch_seconds)


TASKS: dict[str, Task] = {"transcribe": Transcription(), "enhance": Enhancement()}


def task_of(model: SpeechModel) -> Task:
    return TASKS[model.task]
