"""Progressive replacement: swap, stages, evaluation, one folder a step. Run again, it goes on after the last one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import records, surgery
from ..errors import LpaError
from ..families.base import SpeechModel
from ..journal import whole_file
from ..mixers import resolve
from ..plan import Swap
from . import order, progress
from . import sweep as sweeps
from .beside import beside, fresh_mixer, layer_objective, without_dropout
from .config import ConvertConfig, derive, read_json, write_json
from .session import Session, TimeUp
from .stages import Stage, final_stages, fix_temperature, parameter_groups, rates, set_temperature, step_stages

FINAL = 10_000  # the final tuning's number where seeds are derived


def convert(config: ConvertConfig, out: Path, record: Path | None = None) -> Path:
    """A whole conversion, to the model folder OUT/model (OUT itself where time was up). `record`: folder of records."""
    session = Session(config, Path(out))
    conversion = Conversion(config, session, record)
    try:
        conversion.run()
    except TimeUp:
        session.say("time is up; the same command goes on")
        return session.out
    return session.out / "model"


class Conversion:
    """One run of a conversion, or of its control."""

    def __init__(self, config: ConvertConfig, session: Session, record: Path | None = None):
        self.config, self.session, self.record, self.out = config, session, record, session.out
        self.swaps: dict[int, Swap] = {}
        self.teacher: SpeechModel | None = None
        self.locked: set[str] = set()

    def run(self) -> None:
        if (self.out / "result.json").is_file():
            self.session.say(f"{self.out}: finished")
            return
        model = self.load(self.config.model)
        if model.swaps:
            raise LpaError(f"{self.config.model} has layers without attention; convert the model it came from")
        chosen = self.settle_order(model)
        self.session.listen(model)
        if self.config.kl_weight or self.config.hidden_weight:
            self.teacher = self.session.load(self.config.model) if self.config.trains else None
        if self.session.lacks(self.folder(0)):
            self.finish(0, {"layers": [], "wer": self.session.wer(model), "stages": [], "seconds": 0.0}, None)
        steps = order.groups(chosen, self.config.progressive)
        table = progress.Steps(len(steps), self.session.main)
        table.add(self.recorded(0), ran=False)
        if self.config.budget and self.recorded(0)["wer"] is None:
            raise LpaError(f"{self.config.model} has no CTC head, so it has no WER to keep within a budget")
        last = self.replace(steps, table)
        self.conclude(last, [i for group in steps[:last] for i in group], table)

    def replace(self, steps: list[tuple[int, ...]], table: progress.Steps) -> int:
        """All steps; the number of the last one within the budget."""
        for number, new in enumerate(steps, 1):
            ran = self.session.lacks(self.folder(number))
            if ran:
                done = [i for group in steps[: number - 1] for i in group]
                self.step(number, new, done)
            found = self.recorded(number)
            table.add(found, ran)
            if self.config.budget and found["wer"] > self.config.budget:
                return number - 1
        return len(steps)

    def step(self, number: int, new: tuple[int, ...], done: list[int]) -> None:
        """Swap the new layers and train, starting from what the step before has saved: a resumed run does the same."""
        began = time.monotonic()
        model = self.load(self.folder(number - 1) / "model" if number > 1 else self.config.model)
        ran: list[dict[str, Any]] = []
        stages = step_stages(self.config)
        mixers = {} if self.config.keep_attention else {i: self.fresh(model, i) for i in new}
        for place, stage in enumerate(stages):
            if stage.name == "warm":
                ran.append(self.warm(model, stage, mixers, number, place))
        for index, mixer in mixers.items():
            surgery.swap(model, index, self.swaps[index].mixer, self.swaps[index].config)
            surgery.mixer_at(model, index).load_state_dict(mixer.state_dict())
        if self.config.trains:  # else the mixers are as they were built
            fix_temperature(model, new, self.config.tau[1])
        model.eval()
        replaced = [*done, *new]
        for place, stage in enumerate(stages):
            if stage.name != "warm":
                scope = list(new) if stage.scope == "new" else replaced
                ran.append(self.stage(model, stage, scope, number, place, ran[-1]["wer"] if ran else None))
        wer = ran[-1]["wer"] if ran and ran[-1]["wer"] is not None else self.session.wer(model)
        swapped = [vars(self.swaps[i]) for i in mixers]
        found = {"layers": list(new), "replaced": sorted(replaced), "wer": wer, "stages": ran, "swaps": swapped}
        self.finish(number, {**found, "seconds": time.monotonic() - began}, model)

    def conclude(self, last: int, replaced: list[int], table: progress.Steps) -> None:
        """The final joint tuning of the last step that counts, then OUT/model and OUT/result.json."""
        model = self.load(self.folder(last) / "model" if last else self.config.model)
        ran = [
            self.stage(model, stage, replaced, FINAL, place, self.recorded(last)["wer"])
            for place, stage in enumerate(final_stages(self.config) if last else ())
        ]
        steps = [self.recorded(n) for n in range(last + 1)]
        wer = ran[-1]["wer"] if ran else steps[-1]["wer"]
        predicted = read_json(self.out / "order.json")["predicted"]
        result = {
            "wer": wer,
            "wer_before": steps[0]["wer"],
            "replaced": sorted(replaced),
            "attention_kept": self.config.keep_attention,
            "steps": steps,
            "final": ran,
            "predicted": predicted,
            "outcome": None if wer is None or steps[0]["wer"] is None else {"wer_points": wer - steps[0]["wer"]},
        }
        if self.session.main:
            surgery.save(model, self.out / "model")
            write_json(self.out / "result.json", result)
            self.write_record("final", result)
            for left in (self.out / "work", *self.out.glob(".model-*")):  # the latter: of a save that was killed
                shutil.rmtree(left, ignore_errors=True)
        self.session.accelerator.wait_for_everyone()
        table.end(wer)

    # --- stages

    def warm(self, model: SpeechModel, stage: Stage, mixers: dict[int, Any], number: int, place: int) -> dict[str, Any]:
        """The new mixers, beside the attention they will replace, towards its output."""
        assert stage.tau is not None
        set_temperature(mixers.values(), stage.tau[0])
        with beside(model, mixers):
            scales = {n: stage.rate for n, _ in model.named_parameters() if n.startswith("beside.")}
            training, folder = self.training(stage, number, place)
            self.session.fit(
                model,
                training,
                folder,
                parameters=parameter_groups(model, scales, training.weight_decay),
                loss=layer_objective(mixers),
                on_step=without_dropout(model),
            )
        return {"name": stage.name, "steps": training.steps, "wer": None, "reverted": False}

    def stage(
        self, model: SpeechModel, stage: Stage, scope: list[int], number: int, place: int, before: float | None
    ) -> dict[str, Any]:
        """One stage on the model as it stands; `before`: its WER, where that is known."""
        scales = rates(model, stage, scope, self.locked)
        parameters = {n: p for n, p in model.named_parameters() if n in scales}
        training, folder = self.training(stage, number, place)
        mixers = [surgery.mixer_at(model, i) for i in scope]
        keeper = None
        if stage.revert:
            start = self.session.wer(model) if before is None else before
            keeper = Keeper(folder / "best.pt", parameters, start, self.session)

        def on_step(step: int) -> None:
            if stage.tau:
                set_temperature(mixers, order.temperature(stage.tau, step, training.steps))

        def on_eval(model: SpeechModel) -> dict[str, Any]:
            if stage.tau:
                set_temperature(mixers, stage.tau[1])  # the one the model will have
            return {} if keeper is None else keeper.look(model)

        fit = self.guard(model, keeper) if keeper else self.session.fit
        fit(
            model,
            training,
            folder,
            teacher=self.teacher,
            parameters=parameter_groups(model, scales, training.weight_decay),
            on_step=on_step,
            on_eval=on_eval if keeper else None,
        )
        if stage.tau:
            fix_temperature(model, scope, stage.tau[1])
        reverted = keeper.restore() if keeper else False
        wer = keeper.wer if keeper else self.session.wer(model)
        return {"name": stage.name, "steps": training.steps, "wer": wer, "reverted": reverted}

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
            **changes,
        )
        which = "final tuning" if number == FINAL else f"step {number}, {stage.name}"
        self.session.say(f"{which}: {config.steps} training steps")
        return config, self.out / "work" / f"{number:02d}-{place}-{stage.name}"

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
            write_json(beside_it / "record.json", {"step": number, **found})
            os.rename(beside_it, self.folder(number))
            self.write_record(f"step {number}", found)
            for work in (self.out / "work").glob(f"{number:02d}-*"):
                shutil.rmtree(work)
        self.session.accelerator.wait_for_everyone()

    def write_record(self, what: str, found: dict[str, Any]) -> None:
        if self.record is None or found["wer"] is None:
            return
        kind = "control" if self.config.keep_attention else "convert"
        figures = {"wer": found["wer"], "layers": len(found.get("replaced", ()))}
        if "seconds" in found:
            figures["seconds"] = found["seconds"]
        records.write(
            kind,
            what=what,
            model=self.config.model,
            data=", ".join(self.config.sources),
            seed=self.config.seed,
            figures=figures,
            folder=self.record,
            config=self.config.to_dict(),
        )

    # --- what goes where

    def settle_order(self, model: SpeechModel) -> list[int]:
        """Layers in order, with the mixer of each: decided once, read from OUT/order.json ever after."""
        path = self.out / "order.json"
        if self.session.lacks(path):
            swaps, predicted = self.planned() if self.config.plan else (self.ordered(len(model.sites())), None)
            for entry in swaps:
                surgery.find_site(model, entry.index)
            if self.session.main:
                write_json(path, {"swaps": [vars(s) for s in swaps], "predicted": predicted})
            self.session.accelerator.wait_for_everyone()
        swaps = [Swap(**entry) for entry in read_json(path)["swaps"]]
        self.swaps = {s.index: s for s in swaps}
        return [s.index for s in swaps]

    def ordered(self, layers: int) -> list[Swap]:
        config = self.config
        if config.layers > layers:
            raise LpaError(f"this model has {layers} layers; {config.layers} cannot be replaced")
        rule = config.order
        if order.needs_sweep(rule) and not config.progressive and config.layers in (0, layers):
            rule = "depth"  # all at once: no order, so no sweep
        swept = self.swept() if order.needs_sweep(rule) or config.allocate else {}
        chosen = order.arrange(rule, layers, swept)
        chosen = chosen[: config.layers or len(chosen)]
        return [Swap(i, config.mixer, self.settings(swept.get(i, {}))) for i in chosen]

    def settings(self, row: dict[str, Any]) -> dict[str, Any]:
        given = {**self.config.mixer_config, **(row.get("allocation", {}) if self.config.allocate else {})}
        return resolve(self.config.mixer, given)[1].to_dict()

    def swept(self) -> dict[int, dict[str, Any]]:
        if self.config.sweep:
            return sweeps.read(self.config.sweep)
        if sweeps.sweep(self.config.sweeping(), self.out / "sweep") is None:
            raise TimeUp
        return sweeps.read(self.out / "sweep")

    def planned(self) -> tuple[list[Swap], dict[str, Any]]:
        choice = read_json(Path(self.config.plan))
        try:
            return [Swap(**entry) for entry in choice["swaps"]], choice["predicted"]
        except (TypeError, KeyError):
            raise LpaError(f"{self.config.plan} is no choice.json of `lpa plan`") from None


class Keeper:
    """The best state of some parameters on the held-out speakers: the one at the start, or one of those looked at."""

    def __init__(self, path: Path, parameters: dict[str, Any], wer: float | None, session: Session):
        if wer is None:
            raise LpaError("a stage that may be undone needs held-out speakers to judge it by")
        self.path, self.parameters, self.session = path, parameters, session
        self.start_wer = self.wer = wer
        self.start = {name: p.detach().clone() for name, p in parameters.items()}
        if path.is_file():
            self.wer = self.kept()["wer"]

    def kept(self) -> dict[str, Any]:
        return torch.load(self.path, map_location="cpu", weights_only=True)

    def look(self, model: SpeechModel) -> dict[str, Any]:
        """Evaluate, and keep the state unless an earlier one is better."""
        wer = self.session.wer(model)
        assert wer is not None
        if wer <= self.wer:
            self.wer = wer
            if self.session.main:
                state = {name: p.detach().cpu() for name, p in self.parameters.items()}
                with whole_file(self.path) as file:
                    torch.save({"wer": wer, "state": state}, file)
            self.session.accelerator.wait_for_everyone()
        return {"wer": wer}

    @torch.no_grad()
    def restore(self) -> bool:
        """Put the best state back; whether that is the one at the start."""
        reverted = not self.path.is_file()
        state: dict[str, Tensor] = self.start if reverted else self.kept()["state"]
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])
        return reverted
