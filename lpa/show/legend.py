"""What the picture says in words and colours, once for both of its forms. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

NEAR = 0.5  # seconds either side: the short window that difficulty is told by


@dataclass(frozen=True)
class Kind:
    """One kind of pulse: its colour on light and on dark ground, and what it is."""

    light: str
    dark: str
    about: str


PULSES = {
    "aperiodic": Kind("#c8501e", "#f08a5a", "one window, placed and sized by what is said"),
    "periodic": Kind("#7446b8", "#b492ee", "a window that repeats, at a pace found from the recording"),
    "positional": Kind("#15803d", "#5cc98a", "windows at fixed places of the recording, whatever is said"),
    "anchored": Kind("#b5286f", "#f07cb4", "goes along with the moment; place and width follow from what is said"),
    "ladder": Kind("#946200", "#dfae4a", "goes along with the moment, always as far away and as wide"),
    "window": Kind("#2f5fc4", "#86a9f5", "as far as the layer sees; inside it weighs frame by frame"),
    "block": Kind("#5b2a86", "#c79af0", "pyramid, near the moment: weighs frame by frame"),
    "piece": Kind("#a3368f", "#ea86d8", "pyramid, beside that: means of a few frames"),
    "wide": Kind("#c9632b", "#f0a070", "pyramid, further out: means of many frames"),
}

INTRO = (
    "Every layer lets each moment of the recording gather from other moments: in attention from all, weighed one by "
    "one; in a replacement through pulses, windows over time."
)
HILLS = (
    "how much the marked moment takes from every other. Heights are square roots, and every strip is scaled to its own "
    "highest point, so that the faint is seen: compare places within a strip, not strips."
)
BARS = (
    "where the layer's pulses lie, the strongest of each kind. The more the marked moment takes through a pulse, the "
    "stronger its colour. How wide the outlined ones are stands under them."
)
SQUARES = (
    "all moments at once. Each row is a moment, strongest in colour where it takes most; on the diagonal it takes from "
    "itself."
)
DIFFICULTY = (
    f"share of what the layer puts out here that is lost if it may look only {NEAR:g} s either way. At 0 % a short "
    "window does for it; near 100 % it lives on what is far away."
)
IMPORTANCE = "share of the model's output here that is lost if the layer gathers nothing."
SWEPT = "share of the attention's output that a replacement left unexplained in `lpa sweep`, over all its speech."
UNSWEPT = (
    "difficulty over much speech is not given. `lpa sweep MODEL --data SPEECH --out FOLDER` measures it on the model "
    "with its attention; --sweep FOLDER adds it here."
)


def guide(pulses: bool, swept: bool) -> dict[str, str]:
    """How to read the picture, by what is explained."""
    told = {"hills": HILLS, "bars": BARS, "squares": SQUARES, "difficulty": DIFFICULTY, "importance": IMPORTANCE}
    if not pulses:
        del told["bars"]
    return told | {"swept": SWEPT if swept else UNSWEPT}


def percent(share: float) -> str:
    """A share as it is printed; nothing that is there becomes 0 %."""
    return "under 1 %" if 0.0005 < share < 0.01 else f"{100 * share:.0f} %"


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Round times up to `seconds`, nine at most, each with a label that says just that time."""
    step = next((s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if seconds / s <= 8), 10)
    times = [round(i * step, 2) for i in range(int(seconds / step + 1e-6) + 1)]
    return [(t, f"{t:g} s") for t in times]
