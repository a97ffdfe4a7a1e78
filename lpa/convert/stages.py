"""The stages of a conversion, as data: what each trains, at which rate, towards what, at which temperature."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import LpaError
from ..families.base import SpeechModel
from ..surgery import mixer_at
from .config import ConvertConfig

Rates = tuple[tuple[str, float], ...]
PARTS = ("mixer", "norms", "ffn", "rest")
FRONT = "feature_extractor."  # the convolutions before anything that is ever replaced; always frozen
LAYER = re.compile(r".*\.layers\.\d+\.")  # of a site's path
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d)


@dataclass(frozen=True)
class Stage:
    """One stretch of training."""

    name: str
    epochs: float
    trains: Rates  # part of the model -> multiple of lr
    losses: Rates  # mse (of the layer, beside its attention), ctc, kl, hidden -> weight
    scope: str = "new"  # the layers of this step, or all that are `replaced`
    rate: float = 1.0  # multiple of all rates
    tau: tuple[float, float] | None = None  # of the scope's layers, at the start and at the end; None: as they are
    revert: bool = False  # keep the best state on the held-out speakers, which may be the one before


def step_stages(config: ConvertConfig) -> tuple[Stage, ...]:
    """What follows every swap."""
    start, end = config.tau
    warm = Stage("warm", config.warm_epochs, (("mixer", 1.0),), (("mse", 1.0),), tau=(start, start))
    block: Rates = (("mixer", 1.0), ("norms", config.norms), ("ffn", config.ffn), ("rest", config.rest))
    aligned: Rates = (("mixer", 1.0), ("norms", config.norms), ("rest", config.rest))
    settle = Stage("settle", config.settle_epochs, block, aims(config), tau=(start, end))
    align = Stage(
        "align", config.align_epochs, aligned, aims(config), "replaced", config.align_rate, (start, end), revert=True
    )
    stages = (settle, align) if config.keep_attention else (warm, settle, align)
    return tuple(stage for stage in stages if stage.epochs)


def final_stages(config: ConvertConfig) -> tuple[Stage, ...]:
    """What follows the last step."""
    parts: Rates = (("mixer", 1.0), ("norms", config.norms), ("ffn", config.ffn), ("rest", config.rest))
    harder = (config.tau[1], config.final_tau) if config.final_tau else None
    final = Stage("final", config.final_epochs, parts, aims(config), "replaced", config.final_rate, harder)
    return (replace(final, revert=config.keep_best),) if final.epochs else ()


def aims(config: ConvertConfig) -> Rates:
    weights = (("ctc", config.ctc_weight), ("kl", config.kl_weight), ("hidden", config.hidden_weight))
    return tuple((name, weight) for name, weight in weights if weight)


def rates(model: SpeechModel, stage: Stage, layers: Collection[int], locked: Collection[str] = ()) -> dict[str, float]:
    """Multiple of lr of every parameter that a stage trains, by name. `layers`: the scope; `locked`: never trained."""
    scale = {part: stage.rate * rate for part, rate in stage.trains}
    if unknown := set(scale) - set(PARTS):
        raise LpaError(f"stage {stage.name} trains {', '.join(unknown)}; have {', '.join(PARTS)}")
    norms = norm_parameters(model)
    blocks = {site.index: f"net.{site.path}." for site in model.sites() if site.index in layers}
    found = {}
    for name, _ in model.named_parameters():
        part = part_of(model, name, blocks, norms)
        if name.startswith("net.") and name not in locked and FRONT not in name and scale.get(part, 0):
            found[name] = scale[part]
    return found


def part_of(model: SpeechModel, name: str, places: dict[int, str], norms: Collection[str]) -> str:
    """mixer (attention, where that was left in), norms or ffn of one of the layers whose sites are given; else rest."""
    for index, site in places.items():
        block = LAYER.match(site)
        assert block is not None
        if name.startswith(site):
            return "mixer" if index not in model.swaps or name.startswith(site + "mixer.") else "rest"
        if name.startswith(block[0]):
            return "norms" if name in norms else "ffn"
    return "rest"


def norm_parameters(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }


def parameter_groups(model: nn.Module, scales: dict[str, float], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups for `fit`: by multiple of lr, vectors and scalars without weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name in scales:
            decay = weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((scales[name], decay), []).append(parameter)
    return [{"params": p, "scale": scale, "weight_decay": decay} for (scale, decay), p in groups.items()]


def set_temperature(mixers: Iterable[Any], tau: float) -> None:
    """The temperature of those mixers that have one."""
    for mixer in mixers:
        if hasattr(mixer, "tau"):
            mixer.tau = tau


def fix_temperature(model: SpeechModel, layers: Iterable[int], tau: float) -> None:
    """The temperature from now on: the one the model will be saved with."""
    for index in layers:
        swap, mixer = model.swaps.get(index), mixer_at(model, index)
        if swap is not None and hasattr(mixer, "tau"):
            mixer.tau = tau
            model.swaps[index] = replace(swap, config={**swap.config, "tau": tau})
