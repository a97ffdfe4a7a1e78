"""Which layer goes first, and how many pulses each keeps. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LpaError

MEASURES = {"sweep": "mse", "kl": "kl"}  # order -> what of a sweep's layer it sorts by
RULES = "sweep, kl, depth, reverse, random:SEED or layers such as 0,3,1"


def needs_sweep(order: str) -> bool:
    return order in MEASURES


def arrange(order: str, layers: int | Sequence[int], swept: Mapping[int, Mapping[str, Any]] | None = None) -> list[int]:
    """All layers (so many, or these), or those an explicit list names, in the order of replacement.

    `swept`: a sweep's layers by index.
    """
    pool = range(layers) if isinstance(layers, int) else layers
    if order in MEASURES:
        return by_measure(MEASURES[order], pool, swept or {})
    if order == "depth":
        return list(pool)
    if order == "reverse":
        return list(pool)[::-1]
    kind, _, rest = order.partition(":")
    if kind == "random" and rest.isdigit():
        return random.Random(int(rest)).sample(pool, len(pool))
    return listed(order, max(pool, default=-1) + 1)


def by_measure(name: str, layers: Sequence[int], swept: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Easiest first; of equals the lower layer."""
    missing = [i for i in layers if swept.get(i, {}).get(name) is None]
    if missing:
        raise LpaError(
            f"the sweep has no {name} of layer {missing[0]}; sweep all layers first, or choose another order"
        )
    return sorted(layers, key=lambda i: (swept[i][name], i))


def listed(order: str, layers: int) -> list[int]:
    """Layers as they are written: 0,3,1."""
    try:
        found = [int(part) for part in order.split(",")]
    except ValueError:
        raise LpaError(f"no order {order!r}; have {RULES}") from None
    odd = [i for i in found if not 0 <= i < layers]
    if odd:
        raise LpaError(f"order {order}: there is no layer {odd[0]}; this model has layers 0 to {layers - 1}")
    if len(set(found)) < len(found):
        raise LpaError(f"order {order} names a layer twice")
    return found


def groups(layers: Sequence[int], progressive: bool) -> list[tuple[int, ...]]:
    """The layers each step replaces: one at a time, or all at once."""
    if not layers:
        return []
    return [(i,) for i in layers] if progressive else [tuple(layers)]


def surviving(
    amplitudes: Sequence[Sequence[float]], counts: Mapping[str, int], theta: float, floor: int
) -> dict[str, list[int]]:
    """Pulses whose |amplitude| exceeds θ, by type, one number a head, never fewer than the floor (or than there are).

    amplitudes: (heads, pulses), a head's pulses in the order of `counts`.
    """
    found: dict[str, list[int]] = {}
    start = 0
    for name, count in counts.items():
        alive = [sum(abs(a) > theta for a in head[start : start + count]) for head in amplitudes]
        if count:
            found[name] = [max(n, min(floor, count)) for n in alive]
        start += count
    return found


def allocation(survivors: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Pulses of each type a head needs: the mean over heads, rounded up, for all heads of a layer have as many."""
    return {name: math.ceil(sum(heads) / len(heads)) for name, heads in survivors.items()}


def fading(share: float, step: float, steps: int) -> float:
    """What is left at a step (from 0) of something that is gone after a share of the steps: 1 falling to 0."""
    return max(0.0, 1 - step / (share * steps)) if share else 0.0


def temperature(ends: tuple[float, float], step: float, steps: int) -> float:
    """τ at a step (from 0): the same share off at every step, and at the last step the end itself."""
    start, end = ends
    return end if step >= steps - 1 else start * (end / start) ** (step / (steps - 1))
