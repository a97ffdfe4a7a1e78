"""`lpa report`: the README's tables and the evidence page, from records alone. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import LpaError
from . import readme as blocks
from .measured import load
from .page import render


def report(out: Path, results: Path, readme: Path, check: bool = False) -> Path:
    """Write OUT/index.html and the README's tables; with `check` write nothing, and raise where the README differs."""
    found = load(results)
    text = blocks.read(readme)
    made = blocks.rewrite(text, found, str(readme))
    page = Path(out) / "index.html"
    if check:
        if made != text:
            raise LpaError(f"the tables of {readme} are not those of {results}; run `lpa report`")
        return page
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(found), encoding="utf-8")
    if made != text:
        readme.write_text(made, encoding="utf-8")
    return page
