"""The evidence page: one HTML file that asks nothing of a network. Every measured number links to its record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

from . import ablation, cleaning, layer, ours, quality, speed
from .charts import draw
from .items import (
    DIFFERENT,
    IMPOSSIBLE,
    MISSING,
    OURS,
    REPRODUCED,
    Cell,
    Figure,
    Grid,
    Item,
    Verdict,
    machine_below,
)
from .measured import Record

PAPER: tuple[Callable[[list[Record]], Item], ...] = (
    *(ablation.table_1, cleaning.table_2, speed.table_3, quality.table_4, speed.table_5, quality.table_6),
    *(quality.table_7, quality.table_8, speed.table_9, speed.table_10, layer.table_11),
    *(layer.figure_1, quality.figure_2, speed.figure_3, speed.figure_4),
)
OURS_ALONE = (
    *(ours.tested, ours.converted, ours.by_duration, ours.by_training, ours.by_temperature, ours.by_latency),
    *(ours.planned, ours.tried, cleaning.enhancement, cleaning.cleaned),
    *(speed.start_to_text, speed.peers, speed.twins, layer.layer_table),
)
COMMANDS = 3  # listed below an item; all are in the records
MARKS = (REPRODUCED, DIFFERENT, IMPOSSIBLE, MISSING)
RECORD_COLUMNS = ("record", "of what", "figures", "command", "seed", "commit", "machine", "date")
WRAPPED = (1, 2, 3, 6)


def render(found: list[Record], lost: frozenset[str] = frozenset()) -> str:
    """The whole page. `lost`: commits that the repository does not hold."""
    compared, own = [make(found) for make in PAPER], [make(found) for make in OURS_ALONE]
    commands = {record["id"]: record["command"] for record in found}
    tally = Counter(item.mark() for item in compared)
    counts = "".join(f"<li><b>{tally[mark]}</b>{mark}</li>" for mark in MARKS)
    links = (
        ("#glance", "At a glance"),
        ("#ours", "Ours"),
        ("#paper", "The paper, item by item"),
        ("#records", "Records"),
    )
    menu = "".join(f'<li><a href="{target}">{name}</a></li>' for target, name in links)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>lpa: the evidence</title>
<style>{asset("charts.css")}{asset("page.css")}</style></head>
<body><header><h1>How much attention does a speech model need?</h1>
<p class="lead">Every table and figure of <i>Learnable Pulse Accumulation</i> (Y. P. Shkolnikov, 2026) with what
<code>lpa</code> measures beside it. Each number measured here links to the record that made it: command, commit, seed,
machine.</p>
<ul class="tally">{counts}</ul></header>
<nav aria-label="Sections"><ul>{menu}<li><button id="theme" type="button">Light / dark</button></li></ul></nav>
<main>
<section id="glance"><h2>At a glance</h2><article>{glance(compared)}</article></section>
<section id="ours"><h2>Ours</h2>{"".join(article(item, commands) for item in own)}</section>
<section id="paper"><h2>The paper, item by item</h2>{"".join(article(item, commands) for item in compared)}</section>
<section id="records"><h2>Records</h2>{all_records(found, lost)}</section>
<footer>Made by <code>lpa report</code> from <code>results/*.jsonl</code> alone. A figure that says “one run” was
measured once, so nothing is known of its spread. The paper's figures are its own.</footer>
</main><script>{asset("page.js")}</script></body></html>
"""


def asset(name: str) -> str:
    """A file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def glance(items: list[Item]) -> str:
    """Every item of the paper with what was found; why it differs is told where the item is."""
    rows = []
    for item in items:
        link = f'<a href="#{item.id}">{item.name}</a>'
        said = "<br>".join(verdict(short(v)) for v in item.verdicts())
        rows.append(f"<tr><td class=item>{link}</td><td>{prose(item.title)}</td><td>{said}</td></tr>")
    return scroll(heads(("item", "what", "ours against it"), set()), "".join(rows))


def short(found: Verdict) -> Verdict:
    """Without reasons where there is a finding; without the command where there is none."""
    return Verdict(MISSING) if found.mark == MISSING else replace(found, why="" if found.what else found.why)


def article(item: Item, commands: dict[str, str]) -> str:
    """One item; commands: by record, what made it."""
    parts = [f"<h3><small>{item.name}</small>{prose(item.title)}</h3>"]
    parts += [f'<p class="verdict">{verdict(v)}</p>' for v in item.verdicts()]
    table, notes = "", list(item.notes)
    if item.grid is not None and item.grid.rows:
        shown, *machine = machine_below(item.grid)
        table, notes = grid(shown), [*notes, *machine]
    charts = f'<div class="charts">{"".join(map(draw, item.charts))}</div>' if item.charts else ""
    parts.append(f'<div class="body">{table}{charts}</div>')
    parts += [f'<p class="note">{prose(note)}</p>' for note in notes]
    if measured := list(dict.fromkeys(commands[i] for i in sources(item))):
        count = f"{len(measured)} commands" if len(measured) > 1 else "one command"
        more = [f"and {len(measured) - COMMANDS} more: every number links to its own"]
        listed = [f"<code>{escape(c)}</code>" for c in measured[:COMMANDS]] + more * (len(measured) > COMMANDS)
        inside = "".join(f"<li>{words}</li>" for words in listed)
        parts.append(f'<details class="how"><summary>Measured by {count}</summary><ul>{inside}</ul></details>')
    return f'<article id="{item.id}">{"".join(parts)}</article>'


def sources(item: Item) -> list[str]:
    """The records behind an item's figures."""
    cells = [cell for chart in item.charts for line in chart.lines for _, cell in line.points]
    figures = [*(item.grid.figures() if item.grid else []), *(cell for cell in cells if isinstance(cell, Figure))]
    return list(dict.fromkeys(i for figure in figures for i in figure.ids))


def verdict(found: Verdict) -> str:
    """`reproduced: what`; `different: what. Different, because why`; `not possible here, because why`."""
    if found.mark == OURS and not found.of:
        return f'<span class="mark ours-mark">measured</span> {prose(found.what)}'
    kind, word = ("ours-mark", "measured") if found.mark == OURS else (found.mark.replace(" ", "-"), found.mark)
    mark = f'<span class="mark {kind}">{word}</span>{f" ({found.of})" if found.of else ""}'
    said = f": {prose(found.what)}" if found.what else ""
    if not found.why:
        return mark + said
    start = f". {word.capitalize()}, because" if said else ", because"
    return f"{mark}{said}{start} {prose(found.why)}"


def grid(found: Grid) -> str:
    numeric = {i for i in range(1, len(found.columns)) if any(is_number(row[i]) for row in found.rows)}
    body = []
    for row in found.rows:
        cells = (td(cell, found.digits, i in numeric, i in found.ours) for i, cell in enumerate(row))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return scroll(heads(found.columns, numeric, found.ours), "".join(body))


def is_number(cell: Cell) -> bool:
    if isinstance(cell, str):
        return bool(re.fullmatch(r"[−+]?[\d.,]+[×%]?", cell))
    return cell is not None


def heads(columns: tuple[str, ...], numeric: set[int], ours: frozenset[int] = frozenset()) -> str:
    made = []
    for i, name in enumerate(columns):
        kinds = " ".join(k for k, on in (("n", i in numeric), ("mine", i in ours)) if on)
        made.append(f'<th scope="col" class="{kinds}"><button type="button">{escape(name)}</button></th>')
    return "".join(made)


def scroll(head: str, body: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def td(cell: Cell, digits: int, numeric: bool, mine: bool) -> str:
    wide = isinstance(cell, str) and len(cell) > 24
    kinds = " ".join(k for k, on in (("n", numeric), ("mine", mine), ("long", wide)) if on)
    value = ""
    if isinstance(cell, Figure):
        first, *more = cell.ids
        others = "".join(f' <a href="#{i}" title="another run">·</a>' for i in more)
        inside = f'<a href="#{first}">{cell.number()}</a>{others}<small>{escape(cell.around())}</small>'
        value = f' data-v="{cell.value}"'
    elif isinstance(cell, str):
        inside = prose(cell)
        if is_number(cell):
            value = f' data-v="{cell.replace("−", "-").replace(",", "").strip("×%+")}"'
    elif cell is None:
        inside = ""
    else:
        inside = f"{cell:,.{digits}f}" if isinstance(cell, float) else f"{cell:,}"
        value = f' data-v="{cell}"'
    return f'<td class="{kinds}"{value}>{inside}</td>'


def all_records(found: list[Record], lost: frozenset[str]) -> str:
    if not found:
        return '<p class="note">There are none yet.</p>'
    rows, strays = [], sum(r["commit"] in lost for r in found)
    for r in found:
        figures = [f"{name} {value:g}" for name, value in r["figures"].items() if isinstance(value, int | float)]
        of = [escape(str(r[name])) for name in ("what", "model", "data") if r.get(name)]
        cells = (
            f'<a href="#{r["id"]}">{r["id"]}</a>',
            "<br>".join(of),
            escape(", ".join(figures)),
            f"<code>{escape(r['command'])}</code>",
            "" if r.get("seed") is None else str(r["seed"]),
            f'<code title="{escape(r["commit"])}">{escape(short_commit(r["commit"]))}</code>'
            + "<small>not in this repository</small>" * (r["commit"] in lost),
            escape(r["machine"]),
            r["date"][:10],
        )
        made = "".join(f"<td{' class=wrap' if i in WRAPPED else ''}>{cell}</td>" for i, cell in enumerate(cells))
        rows.append(f'<tr id="{r["id"]}">{made}</tr>')
    note = f"{strays} of {len(found)} records name a commit that is not in this repository (it was rewritten before it "
    note += "was merged, or never pushed), so that the very code that made them cannot be checked out."
    said = f'<p class="note">{note}</p>' if strays else ""
    return f"<article>{said}{scroll(heads(RECORD_COLUMNS, set()), ''.join(rows))}</article>"


def short_commit(commit: str) -> str:
    """Ten letters of a commit, and whether files differed from it."""
    head, _, dirty = commit.partition("+")
    return head[:10] + (" + changes" if dirty else "")


def prose(words: str) -> str:
    """Text as HTML, `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))
