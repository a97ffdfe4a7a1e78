"""The CTC alphabet: text to ids and back. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .errors import LpaError

LETTERS = ("<pad>", "|", "'", *"abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Tokens:
    """Symbols by id. `blank` is CTC's empty symbol, `word_gap` the symbol that stands between words."""

    symbols: tuple[str, ...] = LETTERS
    blank: int = 0
    word_gap: str = "|"

    def __post_init__(self):
        doubled = sorted({s for s in self.symbols if self.symbols.count(s) > 1})
        if doubled:
            raise LpaError(
                f"alphabet holds {', '.join(map(repr, doubled))} more than once; every symbol needs its own id"
            )
        if not 0 <= self.blank < len(self.symbols):
            raise LpaError(f"blank {self.blank} is no id of an alphabet of {len(self.symbols)} symbols")
        if self.word_gap not in self.symbols:
            raise LpaError(f"word gap {self.word_gap!r} is not in the alphabet; add it, or name the symbol that is")

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A letter the alphabet has in the other case only is taken in that case."""
        ids = {s: i for i, s in enumerate(self.symbols)}
        found = []
        for letter in self.word_gap.join(text.split()):
            same = next((form for form in (letter, letter.lower(), letter.upper()) if form in ids), None)
            if same is None:
                raise LpaError(f"the alphabet has no symbol for {letter!r} in {text!r}; normalise the text first")
            found.append(ids[same])
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a sequence of frame labels: repeats collapsed, then blanks and markers such as <s> dropped."""
        kept = [self.symbols[i] for i, _ in groupby(ids) if i != self.blank]
        letters = [" " if s == self.word_gap else s for s in kept if s == self.word_gap or not is_marker(s)]
        return " ".join("".join(letters).split())

    def to_dict(self) -> dict[str, Any]:
        return {"symbols": list(self.symbols), "blank": self.blank, "word_gap": self.word_gap}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tokens:
        if set(data) != {"symbols", "blank", "word_gap"}:
            raise LpaError("an alphabet needs exactly the fields symbols, blank, word_gap")
        return cls(tuple(data["symbols"]), data["blank"], data["word_gap"])


def is_marker(symbol: str) -> bool:
    """Whether a symbol is no text: <s>, <unk>, [PAD]."""
    return len(symbol) > 1 and (symbol[0], symbol[-1]) in {("<", ">"), ("[", "]")}
