"""One training loop, on Accelerate: `train` assembles a run from a recipe, `fit` does the steps of any run."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast, broadcast_object_list
from torch import Tensor, nn

from . import augment, families, recipe, surgery
from .data import AudioBank, Batches, Source, open_sources, spread
from .errors import LpaError
from .families.base import Output, SpeechModel
from .feed import Batch, Feed, hear
from .journal import Records, Ticker, list_left_out, whole_file
from .muon import Muon
from .recipe import TrainConfig
from .task import Evaluation, Objective, task_of


class Student(nn.Module):
    """Front, SpecAugment, encoder as one forward, which is what Accelerate can wrap."""

    def __init__(self, model: SpeechModel):
        super().__init__()
        self.model = model

    def forward(self, audio: Tensor, lengths: Any, draws: augment.Draws, hidden: bool) -> Output:
        features, frames = (audio, lengths) if audio.dim() == 3 else self.model.front(audio, lengths)
        return self.model.encode(augment.mask_features(features, frames, draws), frames, hidden=hidden)


def rate(config: TrainConfig, step: float) -> float:
    """The share of lr at a step (counted from 0): up over the warm-up, then down to the floor."""
    warmup = config.warmup * config.steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1.0, config.steps - warmup)
    left = 1 - done if config.schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
    return config.lr_floor + (1 - config.lr_floor) * left


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """An optimiser's groups: by the multiple of lr (first pattern that matches), vectors without weight decay.

    `muon`: the matrices of the layers, where the recipe wants them trained so.
    """
    unused = set(config.lr_scale)
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = next((p for p in config.lr_scale if fnmatch.fnmatchcase(name, p)), None)
        unused.discard(match)
        scale = 1.0 if match is None else config.lr_scale[match]
        if scale and parameter.requires_grad:
            decay = config.weight_decay if parameter.ndim > 1 else 0.0
            muon = config.optimizer == "muon" and parameter.ndim == 2 and ".layers." in name
            groups.setdefault((scale, decay, muon), []).append(parameter)
    if unused:
        raise LpaError(f"lr_scale: no parameter is named like {sorted(unused)[0]!r}; `lpa inspect` lists the layers")
    return [
        {"params": p, "scale": scale, "weight_decay": decay, "muon": muon} for (scale, decay, muon), p in groups.items()
    ]


class Average:
    """An exponential moving average of the trained weights."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.parameters = parameters
        self.decay = decay
        self.values = [p.detach().clone() for p in parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.decay:  # short at first, so that the start is soon forgotten
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def apply(self) -> None:
        """The model has the averaged weights from now on."""
        for parameter, value in zip(self.parameters, self.values, strict=bool(self.decay)):
            parameter.copy_(value)

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, value in zip(self.parameters, self.values, strict=bool(self.decay)):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Accelerate as the recipe wants it: bf16 where there is CUDA, else float32."""
    cuda = torch.cuda.is_available() and config.device != "cpu"
    bf16 = config.precision == "bf16" or (config.precision == "auto" and cuda)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # a mixer may hold what only others make use of
    return Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=not cuda, kwargs_handlers=[unused])


def make_optimizers(groups: list[dict[str, Any]], config: TrainConfig, device: torch.device) -> list:
    """AdamW for all groups but those of Muon."""
    for group in groups:
        group.setdefault("scale", 1.0)
    plain, matrices = ([g for g in groups if g.get("muon", False) == muon] for muon in (False, True))
    fused = device.type == "cuda" or None
    found: list[torch.optim.Optimizer] = []
    if plain:
        found.append(torch.optim.AdamW(plain, config.lr, config.betas, weight_decay=config.weight_decay, fused=fused))
    if matrices:
        found.append(Muon(matrices, config.lr, config.weight_decay))
    return found


class Run:
    """All that a training run is at one moment, and how it is kept."""

    def __init__(self, model, feed, batches, optimizers, average, path: Path, accelerator: Accelerator):
        self.model, self.feed, self.batches, self.optimizers, self.average = model, feed, batches, optimizers, average
        self.path, self.accelerator = path, accelerator
        self.step, self.seconds = 0, 0.0
        self.place: float = 0  # in the schedule of config.steps: the step itself, or by the clock

    def move_on(self, config: TrainConfig, seconds: float) -> None:
        """Find the place in the schedule, after so many seconds of training; the same in every process."""
        self.place = self.step
        if config.minutes:
            self.place = config.steps * seconds / (60 * config.minutes)
            if self.accelerator.num_processes > 1:
                self.place = broadcast(torch.tensor([self.place], device=self.accelerator.device)).item()

    def restore(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if not self.path.is_file():
            return
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for value, kept in zip(self.average.values, state["average"], strict=True):
            value.copy_(kept)
        self.batches.load_state_dict(state["cursor"])

    def keep(self) -> None:
        """Write the checkpoint. Randomness is not in it: every step seeds its own, from (seed, step, process)."""
        if self.accelerator.is_main_process:
            state = {
                "step": self.step,
                "seconds": self.seconds,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "average": self.average.values,
                "cursor": self.batches.state_dict(),
            }
            with whole_file(self.path) as file:
                torch.save(state, file)
        self.accelerator.wait_for_everyone()

    def next_batch(self, rescan: bool) -> np.ndarray:
        """The next global batch; where an epoch ends, what has appeared on the disk meanwhile joins the bank."""
        if rescan and self.batches.position == len(self.batches):
            take_new_shards(self.feed.bank, self.accelerator, self.path.parent)
            self.feed.refresh()
        return self.batches.next()[1]


def take_new_shards(bank: AudioBank, accelerator: Accelerator, out: Path) -> None:
    """All processes take in the shards that the first one sees."""
    found = [bank.new_shards()]
    bank.extend(broadcast_object_list(found)[0])
    if accelerator.is_main_process:
        list_left_out(bank.bad, out / "left_out.jsonl")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed everything a forward pass may draw from (dropout, say), so that it depends on the step alone."""
    value = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def fit(
    model: SpeechModel,
    feed: Feed,
    config: TrainConfig,
    out: Path,
    accelerator: Accelerator,
    *,
    teacher: SpeechModel | None = None,
    parameters: list[dict[str, Any]] | None = None,
    loss: Objective | None = None,
    on_step: Callable[[float], None] | None = None,
    on_eval: Evaluation | None = None,
) -> bool:
    """Train a model for config.steps; whether it is done (else max_minutes were over, and the same call goes on).

    `parameters` are an optimiser's groups, each with a `scale` of lr; `loss` gives the parts with their weights;
    `on_step` is called before each with its place in the schedule, `on_eval` gives an evaluation's record. When it is
    done the model has the averaged weights.
    """
    groups = parameter_groups(model, config) if parameters is None else parameters
    trained = [p for g in groups for p in g["params"]]
    chosen = set(map(id, trained))
    for p in model.parameters():
        p.requires_grad_(id(p) in chosen)
    model.to(accelerator.device)
    if teacher is not None:
        teacher.to(accelerator.device).eval().requires_grad_(False)
    if config.compile:
        for layer in [layer for m in (model, teacher) if m is not None for layer in m.encoder.layers]:
            layer.compile(dynamic=True)
    optimizers = make_optimizers(groups, config, accelerator.device)
    student, *optimizers = accelerator.prepare(Student(model), *optimizers)
    shares = [s.share for s in config.sources] if len(feed.bank.sources) > 1 else None
    batches = Batches(
        feed.bank, config.batch_seconds, seed=config.seed, shares=shares, epoch_seconds=config.epoch_seconds
    )
    run = Run(model, feed, batches, optimizers, Average(trained, config.ema), out / "checkpoint.pt", accelerator)
    run.restore()
    step = Step(run, student, config, teacher, loss or task_of(model).objective(config, model))
    done = _loop(run, step, config, on_step, on_eval)
    model.eval()
    if done:
        run.average.apply()
    accelerator.free_memory(student, *optimizers)
    return done


class Step:
    """One optimiser step of a run; it reads nothing back from the device, so that work can queue up there."""

    def __init__(self, run: Run, student: nn.Module, config: TrainConfig, teacher: SpeechModel | None, loss: Objective):
        self.run, self.student, self.config, self.teacher, self.loss = run, student, config, teacher, loss
        self.around = augment.surroundings(config.seed, run.accelerator.device)
        self.checked = False

    def __call__(self) -> tuple[dict[str, float], Tensor, Tensor]:
        """Weights of the loss's parts by name, this process's sum and count of each (parts, 2), the gradient's norm."""
        run, config, accelerator = self.run, self.config, self.run.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        whole = run.next_batch(any(s.rescan for s in config.sources))
        seed_step(config.seed, run.step, rank)
        batch = run.feed.batch(config, run.model.frames, self.around, run.step, whole, rank, world)
        student = self.student(batch.audio, batch.lengths, batch.draws, bool(config.hidden_weight))
        self.check(student, batch)
        parts = self.loss(student, self.listen(batch), batch)
        sums = torch.stack([part.sum for _, part in parts.values()])
        counts = torch.stack([part.count for _, part in parts.values()])
        means = sums / accelerator.reduce(counts).clamp(min=1)  # over the whole batch, whatever each process has of it
        # times `world`, for gradients are averaged over the processes
        accelerator.backward(
            sum(weight * world * mean for (weight, _), mean in zip(parts.values(), means, strict=True))
        )
        norm = accelerator.clip_grad_norm_(self.student.parameters(), config.clip or math.inf)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * group["scale"] * rate(config, run.place)
            optimizer.step()
            optimizer.zero_grad()
        run.average.update(run.step)
        run.step += 1
        weights = {name: weight for name, (weight, _) in parts.items()}
        return weights, torch.stack([sums.detach(), counts], 1), norm.detach()

    def listen(self, batch: Batch) -> Output | None:
        """What the teacher says: to the same audio, whole, while the student has parts of it masked.

        Nothing of it is trained, so no graph is built; under no_grad a model would look at lengths, and so wait.
        """
        if self.teacher is None:
            return None
        with self.run.accelerator.autocast():
            return hear(self.teacher, batch.audio, batch.lengths, hidden=bool(self.config.hidden_weight))

    def check(self, student: Output, batch: Batch) -> None:
        """Once: the frames CTC is told of are those the model gives."""
        if not self.checked and student.lengths.tolist() != batch.frames.tolist():
            raise LpaError(f"{self.run.model.family}: frames() and the model's output lengths differ; mend the family")
        self.checked = True


def _loop(run: Run, step: Step, config: TrainConfig, on_step, on_eval: Evaluation | None) -> bool:
    """Steps to the end, with records, evaluations and checkpoints in between; False where time was up first."""
    main = run.accelerator.is_main_process
    records = Records(run.path.parent / "train.jsonl", run.step, main)
    opened = began = kept = marked = time.monotonic()
    before, first, marked_step = run.seconds, run.step, run.step
    totals, norms = [], []  # since the last record, left on the device
    run.model.train()
    run.move_on(config, run.seconds)
    with Ticker(run.place, config.steps, main) as ticker:
        while run.place < config.steps:
            if on_step is not None:
                on_step(run.place)
            place, started = run.place, time.monotonic()
            weights, sums, norm = step()
            if config.compile and run.step == first + 1:
                began += time.monotonic() - started  # compiling is not training
            totals.append(sums)
            norms.append(norm)
            run.move_on(config, before + time.monotonic() - began)
            last = run.place >= config.steps
            if record_due := last or run.step % config.log_every == 0:
                record = _summary(run, weights, torch.stack(totals).sum(0), torch.stack(norms).mean())
                now = time.monotonic()
                run.seconds, pace = before + now - began, (run.step - marked_step) / (now - marked)
                lr = config.lr * rate(config, place)
                records.add(step=run.step, **record, lr=lr, seconds=run.seconds, steps_per_second=pace)
                text = f"step {run.step}  loss {record['loss']:.4f}  {pace:.2f} steps/s"
                ticker.show(run.place, text, run.place / max(run.seconds, 1e-9))
                marked, marked_step, totals, norms = now, run.step, [], []
            if on_eval is not None and (last or (config.eval_every and run.step % config.eval_every == 0)):
                started = time.monotonic()
                evaluation = _evaluate(run, on_eval, config.compile)
                records.add(step=run.step, **evaluation)
                text = "  ".join(f"{k} {v:.2f}" for k, v in evaluation.items() if isinstance(v, float))
                ticker.show(run.place, f"step {run.step}  {text}")
                marked += time.monotonic() - started
            if record_due:
                minutes = [(time.monotonic() - since) / 60 for since in (opened, kept)]
                due = [0 < config.max_minutes <= minutes[0], last or minutes[1] >= config.checkpoint_minutes]
                over, keep = broadcast(torch.tensor(due, dtype=torch.int32, device=run.accelerator.device)).tolist()
                if over or keep:
                    run.keep()
                    kept = time.monotonic()
                if over:
                    break
    return run.place >= config.steps


def _evaluate(run: Run, on_eval: Evaluation, compiled: bool) -> dict[str, Any]:
    """An evaluation of the averaged weights; layers that are compiled for training are not compiled again for it."""
    run.model.eval()
    plain = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with run.average.applied(), plain:
        found = on_eval(run.model)
    run.model.train()
    return found


def _summary(run: Run, weights: dict[str, float], totals: Tensor, norm: Tensor) -> dict[str, float]:
    """Means since the last record: the loss, its parts, the gradient's norm. Waits for the device."""
    sums, counts = run.accelerator.reduce(totals).double().cpu().unbind(1)
    means = dict(zip(weights, (sums / counts.clamp(min=1)).tolist(), strict=True))
    loss = sum(weight * means[name] for name, weight in weights.items())
    if not math.isfinite(loss):
        raise LpaError(
            f"the loss is not a number before step {run.step}; lower lr (the last checkpoint is from before)"
        )
    return {"loss": loss, **means, "grad_norm": norm.item()}


def starting_model(config: TrainConfig) -> SpeechModel:
    """The model a recipe starts from; fresh weights are the seed's."""
    if config.model:
        return families.load(config.resolve(config.model), config=config.model_config)
    torch.manual_seed(config.seed)
    return families.create(config.family, config.model_config)


def open_banks(config: TrainConfig, model: SpeechModel) -> tuple[AudioBank, AudioBank | None]:
    """The bank to train on and the one of the held-out speakers; shards that are still being made come later."""
    if not config.sources:
        raise LpaError("the recipe names no sources; add [[sources]] with a path")
    reject = task_of(model).rejecter(model, config)
    fixed = [config.resolve(s.path) for s in config.sources if not s.rescan]
    opened = iter(open_sources(fixed, exclude=config.held_out))
    sources = [
        Source(config.resolve(s.path), [], [], packed=True) if s.rescan else next(opened) for s in config.sources
    ]
    cache = config.resolve(config.cache) or None
    bank = AudioBank(sources, reject=reject, cache=cache)
    if not config.held_out:
        return bank, None
    held = open_sources(fixed, include=config.held_out)
    if config.held_out_limit:
        for source in filter(lambda s: s.utterances, held):
            source.utterances = spread(source.utterances, config.held_out_limit)
    return bank, AudioBank(held, reject=reject, cache=cache)


def train(config: TrainConfig) -> Path:
    """A whole run, from its recipe to the model folder `out`/model. Run again, it goes on where it was."""
    if not config.out:
        raise LpaError("the recipe names no run folder; add --out DIR")
    out = Path(config.resolve(config.out))
    accelerator = make_accelerator(config)
    if accelerator.is_main_process:
        recipe.settle(config, out)
    accelerator.wait_for_everyone()
    if (out / "finished.json").is_file():
        accelerator.print(f"{out}: finished", file=sys.stderr)
        return out / "model"
    model = starting_model(config)
    teacher = families.load(config.resolve(config.teacher)) if config.teacher else None
    bank, held_out = open_banks(config, model)
    take_new_shards(bank, accelerator, out)
    accelerator.print(f"{len(bank)} utterances, {bank.hours:.1f} h, {len(bank.bad)} left out", file=sys.stderr)
    task, on_eval = task_of(model), None
    feed = task.feed(model, bank, accelerator.device, config)
    if held_out is not None:
        accelerator.print(f"held out: {len(held_out)} utterances, {len(held_out.bad)} left out", file=sys.stderr)
        if accelerator.is_main_process:
            list_left_out(held_out.bad, out / "left_out_of_evaluation.jsonl")
        held_feed = task.feed(model, held_out, accelerator.device, config)
        on_eval = task.evaluation(held_feed, accelerator, config.batch_seconds)
    done = fit(model, feed, config, out, accelerator, teacher=teacher, on_eval=on_eval)
    if done and accelerator.is_main_process:
        surgery.save(model, out / "model")
        with whole_file(out / "finished.json") as file:
            file.write(json.dumps({"processes": accelerator.num_processes}).encode())
    accelerator.wait_for_everyone()
    return out / "model" if done else out
