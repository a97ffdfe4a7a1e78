"""For each layer alone: how well a mixer can stand in for its attention, and how many pulses that takes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import losses, records
from ..errors import LpaError
from ..families.base import SpeechModel
from ..feed import hear
from ..mixers import Mixer, resolve
from ..mixers.attention import QueryMixer
from ..surgery import find_site, mixer_at, swap
from ..train import rate
from . import order
from .beside import Unexplained, beside, fresh_mixer, layer_objective, without_dropout
from .config import SweepConfig, derive, read_json, record_once, write_json
from .session import Session, TimeUp, layers_of, measuring, started
from .stages import parameter_groups

TYPES = ("aperiodic", "periodic", "positional", "anchored", "ladder")  # in the order a head has its pulses
PRUNED = TYPES[:-1]  # a ladder's windows are a set: they are kept, or another ladder is chosen
PAPER_EPOCHS = 2.0


def sweep(config: SweepConfig, out: Path, record: Path | None = None) -> dict[str, Any] | None:
    """Sweep every layer into OUT/layer-NN.json and then OUT/sweep.json; None where time was up first.

    `record`: folder of records.
    """
    with started(config, Path(out), epochs_of(config) > 0) as session:
        return sweep_all(session, replace(config, held_out=session.config.held_out), record)


def sweep_all(session: Session, config: SweepConfig, record: Path | None) -> dict[str, Any] | None:
    out = session.out
    if (out / "sweep.json").is_file():
        found = read_json(out / "sweep.json")
        write_records(session, config, found, record)  # those that an earlier run did not
        return found
    if not config.sources:
        raise LpaError("a sweep needs speech; add --data")
    model = session.load(config.model)
    session.listen(model)
    layers = layers_of(model, config.kind)
    size = config.together or len(layers)
    base = session.judge(model)
    groups = [layers[i : i + size] for i in range(0, len(layers), size)]
    missing = [group for group in groups if not all(layer_file(out, i).is_file() for i in group)]
    session.accelerator.wait_for_everyone()  # all processes have looked before one writes
    try:
        for group in missing:
            sweep_group(session, config, model, group, base)
    except TimeUp:
        session.say("time is up; the same command goes on")
        return None
    found = summary(config, [read_json(layer_file(out, i)) for i in layers], base, session.measure.name)
    if session.main:
        write_json(out / "sweep.json", found)
        shutil.rmtree(out / "work", ignore_errors=True)
    write_records(session, config, found, record)
    session.accelerator.wait_for_everyone()
    return found


def write_records(session: Session, config: SweepConfig, found: dict[str, Any], folder: Path | None) -> None:
    """One record a layer, once."""
    if folder is None or not session.main:
        return
    for row in found["layers"]:
        what, code = f"layer {row['layer']}", found.get("commit", "")
        figures = {name: value for name, value in row.items() if isinstance(value, int | float)}
        about = {"what": what, "figures": figures, "folder": folder, "code": code, **config.facts()}
        record_once(session.out, what, partial(records.write, "sweep", **about))


def layer_file(out: Path, index: int) -> Path:
    return out / f"layer-{index:02d}.json"


def sweep_group(
    session: Session, config: SweepConfig, model: SpeechModel, group: list[int], base: float | None
) -> None:
    """Layers trained side by side: each hears the frozen model and has a loss of its own, so none feels the others."""
    settings = provisioned(config)
    device = session.accelerator.device
    mixers = {
        i: fresh_mixer(model, i, config.mixer, settings, derive(config.seed, i)).to(device).train() for i in group
    }
    before = unexplained(session, model, mixers)
    epochs = epochs_of(config)
    if epochs:
        train_beside(session, config, model, mixers, epochs)
    after = unexplained(session, model, mixers) if epochs else before
    plain = posteriors(session, model)
    for index, mixer in mixers.items():
        found = {
            "layer": index,
            "mixer": config.mixer,
            "config": settings,
            "epochs": epochs,
            "mse": after[index].mse,
            "relative": after[index].relative,
            "relative_before": before[index].relative,
            **pulses_left(mixer, config),
            **alone(session, model, index, mixer, plain, base, settings),
            "mflop_per_second": mixer.mflop_per_frame() * model.sequence(find_site(model, index), model.sample_rate)[1],
        }
        if session.main:
            write_json(layer_file(session.out, index), found)
        session.say(line(found))
    session.accelerator.wait_for_everyone()


def provisioned(config: SweepConfig) -> dict[str, Any]:
    """The mixer's settings with more pulses of each of its types than it should need."""
    cls, resolved = resolve(config.mixer, config.mixer_config)
    if not config.provision or not hasattr(resolved, "amplitudes"):
        return resolved.to_dict()
    counts = {name: max(config.provision, getattr(resolved, name)) for name in PRUNED if getattr(resolved, name)}
    return cls.Config.from_dict({**resolved.to_dict(), **counts}).to_dict()


def epochs_of(config: SweepConfig) -> float:
    if config.epochs >= 0:
        return config.epochs
    return 0.0 if issubclass(resolve(config.mixer, config.mixer_config)[0], QueryMixer) else PAPER_EPOCHS


def train_beside(
    session: Session, config: SweepConfig, model: SpeechModel, mixers: dict[int, Mixer], epochs: float
) -> None:
    """MSE against the attention, elastic net on amplitudes; no clipping, which would tie the layers together."""
    steps = max(1, round(epochs * session.epoch(config.seed)))
    folder = session.out / "work" / "-".join(map(str, mixers))
    with beside(model, mixers):
        names = [n for n, _ in model.named_parameters() if n.startswith("beside.")]
        training = session.training(steps, clip=0.0, weight_decay=0.0)
        way = training.lr * sum(rate(training, step) for step in range(steps))  # AdamW moves no weight further
        fast = config.amplitude_travel / way if config.amplitude_travel else 1.0
        scales = {n: fast if n.endswith(".amplitude") else 1.0 for n in names}
        session.fit(
            model,
            training,
            folder,
            parameters=parameter_groups(model, scales, 0.0),
            loss=layer_objective(mixers, config.l1, config.l2),
            on_step=without_dropout(model),
        )


def unexplained(session: Session, model: SpeechModel, mixers: dict[int, Mixer]) -> dict[int, Unexplained]:
    """What each mixer, beside its attention, leaves unexplained on the speech that is measured on."""
    found = {index: Unexplained() for index in mixers}
    with measuring(session, model), beside(model, mixers):
        for audio, lengths in session.hear():
            output: Any = hear(model, audio, lengths)
            for index, sums in found.items():
                sums.add(output, index)
    return found


def pulses_left(mixer: Any, config: SweepConfig) -> dict[str, Any]:
    """Surviving pulses by type and head, and the settings with as many; nothing for mixers without amplitudes."""
    amplitude = getattr(mixer, "amplitude", None)
    if amplitude is None:
        return {"surviving": None, "pulses": None, "allocation": {}}
    counts = {name: getattr(mixer.config, name) for name in TYPES}
    alive = order.surviving(amplitude.detach().cpu().tolist(), counts, config.theta, config.floor)
    alive = {name: heads for name, heads in alive.items() if name in PRUNED}
    return {
        "surviving": sum(map(sum, alive.values())),
        "pulses": sum(counts[name] for name in alive) * mixer.config.heads,
        "survivors": alive,
        "allocation": order.allocation(alive),
    }


def posteriors(session: Session, model: SpeechModel) -> list[tuple[Tensor, Tensor]]:
    """Logits and own frames of everything that is measured on, kept on the CPU: a few MB an hour. Empty: no head."""
    if not model.settings.head:
        return []
    with measuring(session, model):
        outputs: Iterator[Any] = (hear(model, audio, lengths) for audio, lengths in session.hear())
        return [(output.logits.float().cpu(), output.lengths.cpu()) for output in outputs]


def alone(
    session: Session,
    model: SpeechModel,
    index: int,
    mixer: Mixer,
    plain: list[tuple[Tensor, Tensor]],
    base: float | None,
    settings: dict[str, Any],
) -> dict[str, float | None]:
    """KL of the final posteriors against the original's, and the measure, when only this layer is replaced."""
    name = session.measure.name
    if base is None:
        return {"kl": None, name: None, f"{name}_points": None}
    undo = swap(model, index, session.config.mixer, settings)
    mixer_at(model, index).load_state_dict(mixer.state_dict())
    total = frames = 0.0
    for (logits, own), (changed, _) in zip(plain, posteriors(session, model), strict=True):
        part = losses.posterior_kl(changed, logits, own, own, 1.0, torch.ones(len(own)))
        total, frames = total + float(part.sum), frames + float(part.count)
    value = session.judge(model)
    undo()
    points = None if value is None else value - base
    return {"kl": total / max(1.0, frames) if plain else None, name: value, f"{name}_points": points}


def summary(config: SweepConfig, layers: list[dict[str, Any]], base: float | None, measure: str) -> dict[str, Any]:
    """sweep.json: every layer, and both orders."""
    by_layer = {row["layer"]: row for row in layers}
    orders = {"sweep": order.arrange("sweep", list(by_layer), by_layer)}
    if all(row["kl"] is not None for row in layers):
        orders["kl"] = order.arrange("kl", list(by_layer), by_layer)
    facts = {"mixer": config.mixer, "model": config.model, "measure": measure, measure: base}
    facts["commit"] = records.commit()
    return {**facts, "orders": orders, "layers": layers}


def read(folder: str | Path) -> dict[int, dict[str, Any]]:
    """The layers of a finished sweep, by index."""
    path = Path(folder)
    path = path / "sweep.json" if path.is_dir() else path
    if not path.is_file():
        raise LpaError(f"{folder} holds no finished sweep; run `lpa sweep` with --out {folder}")
    return {row["layer"]: row for row in read_json(path)["layers"]}


def line(row: dict[str, Any]) -> str:
    left = f", {row['surviving']} of {row['pulses']} pulses left" if row["pulses"] else ""
    kl = f", KL {row['kl']:.4f}" if row["kl"] is not None else ""
    return f"layer {row['layer']}: MSE {row['mse']:.4g}, {100 * row['relative']:.1f} % unexplained{kl}{left}"


def render(found: dict[str, Any]):
    """The sweep as a rich table, easiest layer first."""
    from rich.table import Table

    points = f"{found.get('measure', 'wer')}_points"
    judged = {"wer_points": "WER +"}.get(points, "SI-SNRi +")
    table = Table(title=f"{found['mixer']}, easiest layer first; left: share of attention's output not explained")
    for name in ("layer", "MSE", "left %", "untrained", "KL", judged, "pulses", "MFLOP/s"):
        table.add_column(name, justify="right")
    rows = {row["layer"]: row for row in found["layers"]}
    for row in (rows[i] for i in found["orders"]["sweep"]):
        table.add_row(
            str(row["layer"]),
            f"{row['mse']:.4g}",
            f"{100 * row['relative']:.1f}",
            f"{100 * row['relative_before']:.1f}",
            "" if row["kl"] is None else f"{row['kl']:.4f}",
            "" if row[points] is None else f"{row[points]:+.2f}",
            f"{row['surviving']}/{row['pulses']}" if row["pulses"] else "",
            f"{row['mflop_per_second']:.0f}",
        )
    return table
