"""What a model is made of: its layers, which are attention and which are not, their size, cost and reach."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from torch import nn

from .families.base import SpeechModel
from .plan import Site
from .surgery import mixer_at

SECONDS = (10, 60)  # attention's cost a second grows with the recording, so it is given at two lengths


def describe(model: SpeechModel) -> dict[str, Any]:
    """JSON-able facts. A layer's figures are those of its mixer, or attention, alone."""
    layers = [describe_layer(model, site) for site in model.sites()]
    total = {str(s): round(sum(layer["mflop_per_second"][str(s)] for layer in layers), 3) for s in SECONDS}
    return {
        "family": model.family,
        "parameters": count(model.net),
        "symbols": len(model.tokens),
        "head": model.settings.head,
        "frame_rate": model.frame_rate,
        "replaced": len(model.swaps),
        "layers": layers,
        "mixing_mflop_per_second": total,
    }


def describe_layer(model: SpeechModel, site: Site) -> dict[str, Any]:
    """One layer: what mixes its frames, and what that costs a second of audio in recordings of SECONDS."""
    module = mixer_at(model, site.index)
    swapped = model.swaps.get(site.index)
    cost = {}
    for seconds in SECONDS:
        frames, pace = model.sequence(site, seconds * model.sample_rate)
        each = attention_mflop(site.dim, frames) if swapped is None else module.mflop_per_frame()
        cost[str(seconds)] = round(each * pace, 3)
    reach = None if swapped is None or module.reach is None else list(module.reach)
    return {
        "index": site.index,
        "path": site.path,
        "mixer": "attention" if swapped is None else swapped.mixer,
        "parameters": count(module),
        "mflop_per_second": cost,
        "reach": reach,  # frames [back, ahead]; None: the whole recording
    }


def attention_mflop(dim: int, frames: int) -> float:
    """A frame's share of full attention: four projections, then scores and a weighted sum over all frames."""
    return (8 * dim * dim + 4 * frames * dim) / 1e6


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def render(facts: dict[str, Any]) -> Table:
    """The facts as a rich table, for a terminal."""
    size = f"{facts['parameters'] / 1e6:.1f} M parameters"
    swapped = f"{facts['replaced']} of {len(facts['layers'])} attention layers replaced"
    table = Table(title=f"{facts['family']} · {size} · {swapped}", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("mixer")
    table.add_column("parameters", justify="right")
    for seconds in SECONDS:
        table.add_column(f"MFLOP/s of audio, {seconds} s", justify="right")
    table.add_column("reach, frames", justify="right")
    for layer in facts["layers"]:
        cost = [f"{layer['mflop_per_second'][str(s)]:,.1f}" for s in SECONDS]
        reach = "all" if layer["reach"] is None else "−{} +{}".format(*layer["reach"])
        style = "" if layer["mixer"] == "attention" else "green"
        table.add_row(str(layer["index"]), layer["mixer"], f"{layer['parameters']:,}", *cost, reach, style=style)
    table.add_section()
    total = [f"{facts['mixing_mflop_per_second'][str(s)]:,.1f}" for s in SECONDS]
    table.add_row("", "all of them", f"{sum(x['parameters'] for x in facts['layers']):,}", *total, "")
    return table
