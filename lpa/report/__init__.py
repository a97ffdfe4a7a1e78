"""`lpa report`: the README's tables and the evidence page, from records alone. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import LpaError
from . import headline
from . import readme as blocks
from .measured import load, lost
from .page import render


def report(out: Path, results: Path, readme: Path, check: bool = False) -> Path:
    """Write OUT/index.html, the README's tables and its picture.

    With `check` write nothing, and raise where tables or picture differ from the records.
    """
    found = load(results)
    text = blocks.read(readme)
    made = {readme: blocks.rewrite(text, found, str(readme))}
    if headline.PLACE in text:
        made[readme.parent / headline.PLACE] = headline.picture(found)
    stale = [path for path, new in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != new]
    page = Path(out) / "index.html"
    if check:
        if stale:
            raise LpaError(f"{stale[0]} is not what {results} says; run `lpa report`")
        return page
    made = {path: made[path] for path in stale}
    for path, new in {page: render(found, lost(found, results)), **made}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8")
    return page
