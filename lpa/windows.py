"""Where the fixed windows around a frame lie, for every runtime: plain numbers, no torch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

PACE = 30.0  # a learned score is this times its parameter: at a weight's pace of learning it would take ages to matter


def rungs(count: int, reach: int) -> list[tuple[int, int]]:
    """`count` windows [lo, hi) around a frame: the frame itself, then ever wider ones on both sides, up to the reach.

    An even count adds the whole reach as its last window.
    """
    sides = (count - 1) // 2
    growth = reach ** (1 / max(1, sides))
    edges = [1]
    for i in range(1, sides + 1):
        edges.append(max(edges[-1] + 1, round(growth**i) + 1))
    windows = [(0, 1)]
    for near, far in pairwise(edges):
        windows += [(near, min(far, reach + 1)), (1 - min(far, reach + 1), 1 - near)]
    if count % 2 == 0:
        windows.append((-reach, reach + 1))
    return windows[:count]


def pyramid_widths(config: dict[str, Any]) -> list[int]:
    """Where a pyramid's windows end beside its block, the block's own end first."""
    return list(accumulate([*config["pieces"], *(config["block"] * s for s in config["steps"])], initial=0))
