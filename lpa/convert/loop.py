"""Progressive replacement: swap, stages, evaluation, one folder a step. Run again, it goes on after the last one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import records, surgery
from ..errors import LpaError
from ..families.base import SpeechModel
from ..mixers import resolve
from ..plan import Swap
from ..recipe import TrainConfig
from ..task import Objective, task_of
from . import order, progress
from . import sweep as sweeps
from .beside import beside, fresh_mixer, layer_objective, without_dropout
from .config import ConvertConfig, derive, read_json, record_once, write_json
from .keeper import Keeper
from .planner import price
from .positions import scores_of_distances, told_by_position, without_positions
from .session import Session, TimeUp, layers_of, measuring, started
from .stages import (
    Stage,
    final_stages,
    fix_temperature,
    parameter_groups,
    rates,
    set_temperature,
    step_stages,
)

FINAL = 10_000  # the final tuning's number where seeds are derived
PLACED_SECONDS = 2000.0  # of speech, from which is found what position alone tells of hidden states
SCORED_SECONDS = 200.0  # and of the scores of attention


def convert(config: ConvertConfig, out: Path, record: Path | None = None) -> Path:
    """A whole conversion, to the model folder OUT/model (OUT itself where time was up). `record`: folder of records."""
    if config.trains and not config.sources:
        raise LpaError("there is nothing to train on; add --data")
    with started(config, Path(out), config.trains) as session:
        config = dataclasses.replace(config, held_out=session.config.held_out)
        try:
            Conversion(config, session, record).run()
        except TimeUp:
            session.say("time is up; the same command goes on")
            return session.out
        return session.out / "model"


def essentials(out: Path) -> dict[str, Any]:
    """What a conversion came to, for programs: its result without the steps on the way."""
    if not (out / "result.json").is_file():
        return {"finished": False, "out": str(out)}
    result = {
        name: value
        for name, value in read_json(out / "result.json").items()
        if name not in ("steps", "final", "commit")
    }
    held_out = read_json(out / "config.json")["held_out"]
    return {"finished": True, "model": str(out / "model"), **result, "held_out": held_out}


class Conversion:
    """One run of a conversion, or of its control."""

    def __init__(self, config: ConvertConfig, session: Session, record: Path | None = None):
        self.config, self.session, self.record, self.out = config, session, record, session.out
        self.swaps: dict[int, Swap] = {}
        self.teacher: SpeechModel | None = None
        self.told: Tensor | None = None  # by position, of the teacher's hidden states
        self.locked: set[str] = set()
        self.steps: list[tuple[int, ...]] = []
        self.sites = 0  # layers of the model
        self.already: dict[int, Swap] = {}  # those that an earlier conversion has replaced
        self.exceeded: int | None = None  # the step that was beyond the budget
        self.table = progress.Steps(0, False, session.measure)

    @property
    def key(self) -> str:
        """The name of what the model is judged by, in records."""
        return self.session.measure.name

    def run(self) -> None:
        finished = (self.out / "result.json").is_file()
        if finished:
            self.session.say(f"{self.out}: finished")
            self.tidy()
            if self.record is None:
                return
        model = self.load(self.config.model)
        if not self.config.positions and not hasattr(model, "drop_positions"):
            raise LpaError(f"{model.family} has no position embedding to take away; leave out positions=false")
        self.sites, self.already = len(model.sites()), dict(sorted(model.swaps.items()))
        chosen = self.settle_order(model)
        if finished:  # killed before all was recorded, or nothing was to be until now
            for number in range(len(list(self.out.glob("step-*")))):
                self.write_record(f"step {number}", self.recorded(number))
            self.write_record("final", read_json(self.out / "result.json"))
            return
        self.session.listen(model)
        if self.config.kl_weight or self.config.hidden_weight:
            self.teacher = self.session.load(self.config.model) if self.config.trains else None
        if self.session.lacks(self.folder(0)):
            found = {"layers": [], "replaced": list(self.already), self.key: self.session.judge(model)}
            self.finish(0, {**found, "stages": [], "seconds": 0.0}, None)
        self.steps = steps = order.groups(chosen, self.config.progressive)
        epochs = [sum(stage.epochs for stage in stages(self.config)) for stages in (step_stages, final_stages)]
        self.table = progress.Steps(len(steps), self.session.main, self.session.measure, (epochs[0], epochs[1]))
        self.write_record("step 0", self.recorded(0))
        self.table.add(self.recorded(0), ran=False)
        if self.config.budget and self.recorded(0)[self.key] is None:
            raise LpaError(f"{self.config.model} has no CTC head, so it has no WER to keep within a budget")
        last = self.replace(steps)
        self.conclude(last, [*self.already, *(i for group in steps[:last] for i in group)])

    def replace(self, steps: list[tuple[int, ...]]) -> int:
        """All steps; the number of the last one within the budget."""
        for number, new in enumerate(steps, 1):
            ran = self.session.lacks(self.folder(number))
            if ran:
                done = [i for group in steps[: number - 1] for i in group]
                self.step(number, new, [*self.already, *done])
            found = self.recorded(number)
            self.write_record(f"step {number}", found)
            self.table.add(found, ran)
            if self.config.budget and not self.session.measure.no_worse(found[self.key], self.config.budget):
                self.exceeded = number
                self.table.stop()
                self.session.say(self.beyond(number, steps))
                return number - 1
        return len(steps)

    def beyond(self, number: int, steps: list[tuple[int, ...]]) -> str:
        """What a budget stop means: what is kept, and how to come further."""
        label, value = self.session.measure.label, self.recorded(number)[self.key]
        kept = ", ".join(str(i) for group in steps[: number - 1] for i in group)
        what = f"step {number - 1} (layers {kept})" if kept else "the model as it was"
        how = "allow more with --budget, or train for longer"
        if len(steps[number - 1]) > 1:
            how += ", or stop part of the way with --set progressive=true"
        return (
            f"step {number} is beyond the budget: {label} {value:.2f} against {self.config.budget:g}; kept is {what}; "
            f"to come further {how}, in another --out"
        )

    def step(self, number: int, new: tuple[int, ...], done: list[int]) -> None:
        """Swap the new layers and train, starting from what the step before has saved: a resumed run does the same."""
        began = time.monotonic()
        model: Any = self.load(self.folder(number - 1) / "model" if number > 1 else self.config.model)
        ran: list[dict[str, Any]] = []
        stages = step_stages(self.config)
        mixers = {} if self.config.keep_attention else {i: self.fresh(model, i) for i in new}
        for place, stage in enumerate(stages):
            if stage.name == "warm":
                ran.append(self.warm(model, stage, mixers, number, place))
        fades = not self.config.positions and number == len(self.steps) and model.settings.positions
        if fades:
            model.drop_positions()
        for index, mixer in mixers.items():
            surgery.swap(model, index, self.swaps[index].mixer, self.swaps[index].config)
            surgery.mixer_at(model, index).load_state_dict(mixer.state_dict())
        if fades:
            fades = not self.place(model)
        if self.config.trains:  # else the mixers are as they were built
            fix_temperature(model, new, self.config.tau[1])
        model.eval()
        replaced = [*done, *new]
        for place, stage in enumerate(stages):
            if stage.name != "warm":
                scope = list(new) if stage.scope == "new" else replaced
                ran.append(self.stage(model, stage, scope, number, place, ran[-1][self.key] if ran else None, fades))
                fades = False  # they are gone
        value = ran[-1][self.key] if ran and ran[-1][self.key] is not None else self.session.judge(model)
        swapped = [vars(self.swaps[i]) for i in mixers]
        found = {"layers": list(new), "replaced": sorted(replaced), self.key: value, "stages": ran, "swaps": swapped}
        self.finish(number, {**found, "seconds": time.monotonic() - began}, model)

    def place(self, model: SpeechModel) -> bool:
        """Where positions are gone, give windows scores for distances instead; whether all mixers could take them."""
        mixers = [surgery.mixer_at(model, site.index) for site in model.sites()]
        placed = [mixer for mixer in mixers if getattr(mixer, "places", None) is not None]
        if placed:
            if not self.session.sources:
                raise LpaError("what position tells is measured on speech; add --data, or keep the positions")
            teacher, other = (self.session.load(self.config.model) for _ in range(2))
            with measuring(self.session, teacher), measuring(self.session, other):
                heard = list(self.session.hear(training=True, seconds=SCORED_SECONDS))
                for mixer, scores in zip(mixers, scores_of_distances(teacher, other, heard), strict=True):
                    if mixer in placed:
                        mixer.add_places(scores)
        return len(placed) == len(mixers)

    def conclude(self, last: int, replaced: list[int]) -> None:
        """The final joint tuning of the last step that counts, then OUT/model and OUT/result.json."""
        model = self.load(self.folder(last) / "model" if last else self.config.model)
        ran = [
            self.stage(model, stage, replaced, FINAL, place, self.recorded(last)[self.key])
            for place, stage in enumerate(final_stages(self.config) if last else ())
        ]
        steps = [self.recorded(n) for n in range(last + 1)]
        before, value = steps[0][self.key], ran[-1][self.key] if ran else steps[-1][self.key]
        predicted = read_json(self.out / "order.json")["predicted"]
        result = {
            "measure": self.key,
            self.key: value,
            f"{self.key}_before": before,
            "replaced": sorted(replaced),
            "attention_kept": self.config.keep_attention,
            "exceeded": self.exceeded,
            "steps": steps,
            "final": ran,
            "predicted": predicted,
            "outcome": None if value is None or before is None else self.outcome(model, value - before),
            "commit": records.commit(),
        }
        if self.session.main:
            surgery.save(model, self.out / "model")
            write_json(self.out / "result.json", result)
        self.write_record("final", result)
        self.tidy()
        self.session.accelerator.wait_for_everyone()
        self.table.end(value)

    def tidy(self) -> None:
        """Of a finished run, what only going on with it would take."""
        if self.session.main:
            for left in (self.out / "work", *self.out.glob(".model-*")):  # the latter: of a save that was killed
                shutil.rmtree(left, ignore_errors=True)

    def outcome(self, model: SpeechModel, points: float) -> dict[str, float]:
        """What a planner predicts: points, and what mixing costs in the layers that had their attention until now."""
        sites = [site.index for site in model.sites() if site.index not in self.already]
        return {f"{self.key}_points": points, "mflop_per_second": sum(price(model, index) for index in sites)}

    # --- stages

    def warm(self, model: SpeechModel, stage: Stage, mixers: dict[int, Any], number: int, place: int) -> dict[str, Any]:
        """The new mixers, beside the attention they will replace, towards its output."""
        assert stage.tau is not None
        set_temperature(mixers.values(), stage.tau[0])
        with beside(model, mixers):
            scales = {n: stage.rate for n, _ in model.named_parameters() if n.startswith("beside.")}
            training, folder = self.training(stage, number, place)
            begun = (folder / "checkpoint.pt").is_file()
            self.session.fit(
                model,
                training,
                folder,
                parameters=parameter_groups(model, scales, training.weight_decay),
                loss=layer_objective(mixers),
                on_step=without_dropout(model),
            )
        self.table.stage(stage.epochs, ran=not begun)
        return {"name": stage.name, **self.spent(folder), self.key: None, "reverted": False}

    def stage(
        self,
        model: Any,
        stage: Stage,
        scope: list[int],
        number: int,
        place: int,
        before: float | None,
        fades: bool = False,
    ) -> dict[str, Any]:
        """One stage on the model as it stands; `before`: its WER, where that is known; `fades`: its positions do."""
        scales = rates(model, stage, scope, self.locked)
        parameters = {n: p for n, p in model.named_parameters() if n in scales}
        training, folder = self.training(stage, number, place)
        begun = (folder / "checkpoint.pt").is_file()
        mixers = [surgery.mixer_at(model, i) for i in scope]
        cool = {i: getattr(mixer, "tau", 0.0) for i, mixer in zip(scope, mixers, strict=True)}
        keeper = None
        if stage.revert:
            start = self.session.judge(model) if before is None else before
            keeper = Keeper(folder / "best.pt", parameters, start, self.session)

        def on_step(step: float) -> None:
            if stage.tau:
                set_temperature(mixers, order.temperature(stage.tau, step, training.steps))
            if fades:
                model.fading = order.fading(self.config.fade, step, training.steps)

        def on_eval(_: SpeechModel) -> dict[str, Any]:
            if stage.tau:
                set_temperature(mixers, stage.tau[1])  # the one the model will have
            if fades:
                model.fading = 0.0
            return {} if keeper is None else keeper.look(model)

        fit = self.guard(model, keeper) if keeper else self.session.fit
        fit(
            model,
            training,
            folder,
            teacher=self.teacher,
            parameters=parameter_groups(model, scales, training.weight_decay),
            loss=self.loss(model, training),
            on_step=on_step,
            on_eval=on_eval if keeper else None,
        )
        if fades:
            model.fading = 0.0
        reverted = keeper.restore() if keeper else False
        if stage.tau:
            for index in scope:
                fix_temperature(model, [index], cool[index] if reverted else stage.tau[1])
        value = keeper.value if keeper else self.session.judge(model)
        self.table.stage(stage.epochs, ran=not begun)
        return {"name": stage.name, **self.spent(folder), self.key: value, "reverted": reverted}

    def loss(self, model: Any, training: TrainConfig) -> Objective:
        """A stage's losses; of hidden states, a student without positions is asked for what they do not tell."""
        plain = task_of(model).objective(training, model)
        if self.config.positions or not training.hidden_weight or model.settings.positions:
            return plain
        if self.told is None:
            assert self.teacher is not None
            with measuring(self.session, self.teacher):
                self.told = told_by_position(self.teacher, self.session.hear(training=True, seconds=PLACED_SECONDS))
        return without_positions(plain, model, self.told)

    def guard(self, model: SpeechModel, keeper: Keeper) -> Callable[..., None]:
        """Training whose divergence is no failure, for there is a state to go back to."""

        def fit(*arguments: Any, **named: Any) -> None:
            try:
                self.session.fit(*arguments, **named)
            except LpaError:
                if all(p.isfinite().all() for p in keeper.parameters.values()):
                    raise
                self.session.accelerator.free_memory()
                model.eval()

        return fit

    def training(self, stage: Stage, number: int, place: int):
        """(settings of the training loop, folder) of one stage of one step."""
        seed = derive(self.config.seed, number, place)
        epoch = self.session.epoch(seed)
        weights = {f"{name}_weight": weight for name, weight in stage.losses if name != "mse"}
        distils = bool(weights.get("kl_weight") or weights.get("hidden_weight"))
        changes = {"ctc_weight": 0.0, **weights} if weights else {}
        config = self.session.training(
            max(1, round(stage.epochs * epoch)),
            seed=seed,
            teacher=self.config.model if distils else "",
            temperature=self.config.temperature,
            eval_every=epoch if stage.revert else 0,
            minutes=self.config.minutes * stage.epochs / self.epochs if self.config.minutes else 0.0,
            **changes,
        )
        which = "final tuning" if number == FINAL else f"step {number}, {stage.name}"
        much = f"{config.minutes:.2f} minutes of training" if config.minutes else f"{config.steps} training steps"
        left = self.table.left()
        self.session.say(f"{which}: {much}" + (f"; {left} left in all" if left else ""))
        return config, self.out / "work" / f"{number:02d}-{place}-{stage.name}"

    @property
    def epochs(self) -> float:
        """Of all stages of all steps; the control's imitation counts, though it has none, so that the rest is alike."""
        whole = dataclasses.replace(self.config, keep_attention=False)
        every = sum(stage.epochs for stage in step_stages(whole))
        return len(self.steps) * every + sum(stage.epochs for stage in final_stages(whole))

    def spent(self, folder: Path) -> dict[str, Any]:
        """Steps and seconds of a stage that is done, as its records say; the process that writes results knows them."""
        if not self.session.main:
            return {}
        path = folder / "train.jsonl"  # of a stage that diverged at once there is none
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        found = ({"steps": r["step"], "seconds": r["seconds"]} for r in reversed(lines) if "seconds" in r)
        return next(found, {"steps": 0, "seconds": 0.0})

    # --- folders

    def load(self, source: str | Path) -> SpeechModel:
        """A model to work on; what its family never trains is noted before anything else is frozen."""
        model = self.session.load(source)
        self.locked = {name for name, p in model.named_parameters() if not p.requires_grad}
        return model

    def fresh(self, model: SpeechModel, index: int):
        seed = derive(self.config.seed, index)
        return fresh_mixer(model, index, self.swaps[index].mixer, self.swaps[index].config, seed)

    def folder(self, number: int) -> Path:
        return self.out / f"step-{number:02d}"

    def recorded(self, number: int) -> dict[str, Any]:
        return read_json(self.folder(number) / "record.json")

    def finish(self, number: int, found: dict[str, Any], model: SpeechModel | None) -> None:
        """A step's folder: written beside, then renamed, so that it is finished or not there."""
        if self.session.main:
            beside_it = self.out / f".step-{number:02d}"
            shutil.rmtree(beside_it, ignore_errors=True)
            beside_it.mkdir()
            if model is not None:
                surgery.save(model, beside_it / "model")
            write_json(beside_it / "record.json", {"step": number, **found, "commit": records.commit()})
            os.rename(beside_it, self.folder(number))
            for work in (self.out / "work").glob(f"{number:02d}-*"):
                shutil.rmtree(work)
        self.session.accelerator.wait_for_everyone()

    def write_record(self, what: str, found: dict[str, Any]) -> None:
        if not self.session.main or self.record is None or found[self.key] is None:
            return
        folder = self.record
        kind = "control" if self.config.keep_attention else "convert"
        stages = [s for step in found.get("steps", [found]) for s in step["stages"]] + found.get("final", [])
        figures = {self.key: found[self.key], "layers": len(found.get("replaced", ()))}
        figures |= {f"training_{name}": sum(stage[name] for stage in stages) for name in ("steps", "seconds")}
        if "seconds" in found:
            figures["seconds"] = found["seconds"]
        told = {"predicted": found["predicted"], "outcome": found["outcome"]} if found.get("predicted") else {}
        told["network"] = {
            "layers": self.sites,
            "mixers": sorted({s.mixer for s in (self.already | self.swaps).values()}),
        }

        def write() -> None:
            made = found.get("commit", "")  # of runs from before it was kept: unknown, so this one's
            records.write(kind, what=what, figures=figures, folder=folder, code=made, **self.config.facts(), **told)

        record_once(self.out, what, write)

    # --- what goes where

    def settle_order(self, model: SpeechModel) -> list[int]:
        """Layers in order, with the mixer of each: decided once, read from OUT/order.json ever after."""
        path = self.out / "order.json"
        if self.session.lacks(path):
            swaps, predicted = self.planned() if self.config.plan else (self.ordered(model), None)
            for entry in swaps:
                surgery.find_site(model, entry.index)
            if self.session.main:
                write_json(path, {"swaps": [vars(s) for s in swaps], "predicted": predicted})
            self.session.accelerator.wait_for_everyone()
        swaps = [Swap(**entry) for entry in read_json(path)["swaps"]]
        self.swaps = {s.index: s for s in swaps}
        return [s.index for s in swaps]

    def ordered(self, model: SpeechModel) -> list[Swap]:
        config = self.config
        pool = layers_of(model, config.kind)
        layers = len(pool)
        if config.layers > layers:
            raise LpaError(f"this model has {layers} layers; {config.layers} cannot be replaced")
        rule = config.order
        if order.needs_sweep(rule) and not config.progressive and config.layers in (0, layers):
            rule = "depth"  # all at once: no order, so no sweep
        mixers = dict(zip(pool, config.mixers(layers), strict=True))
        swept = self.swept() if order.needs_sweep(rule) or config.allocate else {}
        chosen = order.arrange(rule, pool, swept)
        if others := [i for i in chosen if i not in mixers]:
            kind = f"{config.kind} " if config.kind else ""
            raise LpaError(f"order {rule}: layer {others[0]} has no {kind}attention to replace; leave it out")
        if config.layers > len(chosen):
            raise LpaError(f"order {rule} names {len(chosen)} layers; {config.layers} cannot be replaced")
        chosen = chosen[: config.layers or len(chosen)]
        return [Swap(i, mixers[i], self.settings(mixers[i], swept.get(i, {}))) for i in chosen]

    def settings(self, mixer: str, row: dict[str, Any]) -> dict[str, Any]:
        allocated = row.get("allocation", {}) if self.config.allocate else {}
        return resolve(mixer, {**self.placed(mixer), **self.config.settings(mixer), **allocated})[1].to_dict()

    def placed(self, mixer: str) -> dict[str, Any]:
        """What a mixer needs where positions are gone: scores of its own for distances, if it knows such."""
        return {"places": True} if not self.config.positions and hasattr(resolve(mixer)[1], "places") else {}

    def swept(self) -> dict[int, dict[str, Any]]:
        if self.config.sweep:
            theirs = sweeps.read(self.config.sweep)
            found = {row["mixer"] for row in theirs.values()}
            if self.config.allocate and found != {self.config.mixer}:
                raise LpaError(
                    f"{self.config.sweep} is a sweep of {', '.join(sorted(found))}: how many pulses "
                    f"{self.config.mixer} needs it does not know; sweep that, or leave out allocate"
                )
            return theirs
        if sweeps.sweep(self.config.sweeping(), self.out / "sweep", self.record) is None:
            raise TimeUp
        return sweeps.read(self.out / "sweep")

    def planned(self) -> tuple[list[Swap], dict[str, Any]]:
        choice = read_json(Path(self.config.plan))
        try:
            swaps, predicted = [Swap(**entry) for entry in choice["swaps"]], choice["predicted"]
            # mixers were swept where there are positions, so their settings say nothing of being without
            configs = [resolve(s.mixer, {**(s.config or {}), **self.placed(s.mixer)})[1].to_dict() for s in swaps]
        except (TypeError, KeyError):
            raise LpaError(f"{self.config.plan} is no choice.json of `lpa plan`") from None
        return [Swap(s.index, s.mixer, config) for s, config in zip(swaps, configs, strict=True)], predicted
