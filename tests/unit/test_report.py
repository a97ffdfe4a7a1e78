"""`lpa report`: records in, tables and page out; nothing without a command and a commit, nothing that drifts unseen."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import report_records

from lpa import records
from lpa.errors import LpaError
from lpa.plan import Plan, Swap
from lpa.report import conversions, measured, paper, readme, report
from lpa.report.ablation import judge_ablation, why_ablation
from lpa.report.items import DIFFERENT, IMPOSSIBLE, MISSING, OURS, REPRODUCED, Grid, Item, Verdict, machine_below
from lpa.report.page import OURS_ALONE, PAPER, render
from lpa.report.quality import judge_sweep, judge_wall, trained_alike

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return report_records.write(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def found(folder) -> list[dict]:
    return measured.load(folder)


def items(found: list[dict]) -> dict:
    return {item.id: item for item in (make(found) for make in (*PAPER, *OURS_ALONE))}


def line(**changes) -> str:
    record = {"kind": "bench", "what": "x", "model": "m", "figures": {"ms": 1.0}, "commit": "c", "machine": "m"}
    return json.dumps({**record, "command": "lpa bench", "date": "2026-01-01", **changes}) + "\n"


# --- records


@pytest.mark.parametrize("name", ["commit", "command", "machine", "figures"])
def test_a_record_that_cannot_be_made_again_is_refused(tmp_path, name):
    (tmp_path / "bench.jsonl").write_text(line() + line(**{name: ""}))
    with pytest.raises(LpaError, match=rf"bench.jsonl:2 lacks {name}; ") as error:
        measured.load(tmp_path)
    assert "\n" not in str(error.value)


def test_figures_that_are_none_are_refused(tmp_path):
    (tmp_path / "bench.jsonl").write_text(line(figures=[1, 2]))
    with pytest.raises(LpaError, match=r"bench\.jsonl:1: figures must be numbers by name"):
        measured.load(tmp_path)


def test_a_record_says_what_its_model_is_made_of(tmp_path):
    plan = Plan("whisper", {"encoder_layers": 6}, (Swap(0, "pyramid"), Swap(2, "window"), Swap(3, "pyramid")))
    (tmp_path / "plan.json").write_text(plan.to_json())
    written = records.write("wer", what="x", figures={"wer": 1}, model=str(tmp_path), folder=tmp_path)
    assert written["network"] == {"family": "whisper", "layers": 6, "replaced": 3, "mixers": ["pyramid", "window"]}
    assert records.write("wer", what="x", figures={"wer": 1}, model="lpa", folder=tmp_path)["network"] is None


def test_no_folder_is_one_clear_line(tmp_path):
    with pytest.raises(LpaError, match="nowhere is not there"):
        measured.load(tmp_path / "nowhere")


def test_a_figure_says_how_sure_it_is():
    def record(number, **changes):
        return {"id": f"x-{number}", "date": f"2026-01-0{number}", "seed": 0, "figures": {"wer": number}, **changes}

    alone = measured.figure([record(1)], "wer")
    assert (alone.value, alone.around(), alone.ids) == (1, "one run", ("x-1",))
    again = measured.figure([record(2), record(1)], "wer")
    assert (again.value, again.around()) == (2, "one run")  # the latest of a seed
    seeds = measured.figure([record(1), record(2, seed=1), record(4, seed=2)], "wer")
    assert seeds.value == pytest.approx(7 / 3)
    assert seeds.around() == "1.00–4.00, 3 seeds"
    assert len(seeds.ids) == 3
    sure = measured.figure([record(3, interval=[2.5, 3.5], figures={"wer": 3, "cer": 1})], "wer")
    assert sure.around() == "2.50–3.50, 95 %"
    other = measured.figure([record(3, interval=[2.5, 3.5], figures={"wer": 3, "cer": 1})], "cer")
    assert other.around() == "one run"  # the interval is the first figure's
    assert measured.figure([record(1)], "cer") is None


def test_a_benchmark_made_again_tells_the_range_of_its_runs():
    def record(number, **figures):
        return {"id": f"x-{number}", "kind": "bench", "date": f"2026-01-0{number}", "seed": None, "figures": figures}

    again = measured.figure([record(2, speedup=3.0), record(1, speedup=2.0)], "speedup")
    assert (again.value, again.around(), again.ids) == (3.0, "2.00–3.00, 2 runs", ("x-2", "x-1"))
    heard = [record(number, wer=6.0, wer_low=5.0, wer_high=7.0) for number in (1, 2)]
    assert measured.figure(heard, "wer").around() == "5.00–7.00, 95 %"  # no clock decides what is heard


def test_every_row_of_the_ablation_is_known_by_its_settings():
    rows = [conversions.ablation_row(report_records.ablation(row).to_dict()) for row in range(len(paper.ABLATION))]
    assert rows == list(range(len(paper.ABLATION)))
    config = report_records.config("paper").to_dict()
    odd = {**config, "ffn": 0.0}  # a technique in the middle is off: no row of a cumulative table
    assert conversions.ablation_row(odd) is None
    for change in ({"order": "random:0"}, {"final_tau": 0.02}):  # nor another order, nor a stage more
        assert conversions.ablation_row({**config, **change}) is None
    assert conversions.ablation_row(report_records.config("best").to_dict()) is None


def test_series_are_told_apart():
    names = [
        conversions.series(report_records.config(recipe, *changes).to_dict())
        for recipe, *changes in (
            ("paper",),
            ("paper", "order=depth"),
            ("paper", "mixer=summary"),
            ("best",),
            ("best", "minutes=1"),
            ("best", "keep_attention=true"),
            ("none",),
            ("none", "mixer=window", "mixer_config.side=16"),
            ("best", "positions=false", "mixer=window,pyramid"),
            ("best", "plan=choice.json"),
            ("paper", "final_tau=0.02"),
        )
    ]
    assert names == [
        "lpa, paper's recipe, easiest layers first",
        "lpa, paper's recipe, first layers first",
        "summary, paper's recipe, easiest layers first",
        "pyramid of 196 windows, distilled",
        "pyramid of 196 windows, distilled, 1 min",
        "attention kept (control), distilled",
        "pyramid of 196 windows, not trained",
        "window ±16, not trained",
        "pyramid and window, distilled, no positions",
        "the planner's choice, distilled",
        "lpa, paper's recipe, easiest layers first, gates hardened at the end",
    ]


def test_what_is_compared_was_trained_alike():
    def curve(points):
        return dict.fromkeys(range(points), measured.Figure(1.0, ("x-1",)))

    lines = {"lpa, 8 epochs": curve(12), "lpa, 2 epochs": curve(5), "summary, 2 epochs": curve(4)}
    assert trained_alike(lines, "lpa", "summary") == (curve(5), curve(4))
    assert trained_alike({"lpa, 8 epochs": curve(12)}, "lpa", "summary") == (curve(12), {})


# --- against the paper


def test_the_paper_is_all_there(found):
    made = items(found)
    assert {f"table-{n}" for n in range(1, 12)} | {f"figure-{n}" for n in range(1, 5)} <= set(made)
    assert made["table-1"].grid.rows[-1][1] == 9.35
    assert [row[0] for row in made["table-7"].grid.rows] == list(range(11))
    assert made["table-10"].grid.rows[-1][2:6] == ["137.3", "137.33", "281", "281.2"]  # ours, computed, beside it


def test_without_records_the_page_says_what_to_type():
    made = items([])
    open_ones = [item for item in made.values() if item.verdict.mark == MISSING]
    assert len(open_ones) >= 10
    commands = {word for item in open_ones for word in re.findall(r"`(lpa [^`]+)`", item.verdict.what)}
    assert {"lpa bench model --record", "lpa bench roofline --record"} <= commands
    assert all(
        f"not measured yet</span>: {'run' if '`lpa' in i.verdict.what else 'needs'}" in render([]) for i in open_ones
    )
    assert made["table-5"].verdict.mark == IMPOSSIBLE


def test_records_fill_the_tables(found):
    made = items(found)
    assert {item.verdict.mark for item in made.values()} >= {REPRODUCED, IMPOSSIBLE}
    best = next(row for row in made["conversions"].grid.rows if row[1] == "pyramid of 196 windows, distilled")
    assert (best[4].value, best[5].value, best[6]) == (pytest.approx(11.6), pytest.approx(11.5), "+0.10")
    assert (best[7].value, best[8].value, best[9]) == (pytest.approx(9.6), pytest.approx(9.5), "+0.10")
    assert best[4].spread == best[8].spread == "3 seeds"
    ablation = [row[5].value for row in made["table-1"].grid.rows]
    assert ablation == list(report_records.ROWS)
    column = made["table-7"].grid.columns.index("ours, easiest layers first, held-out")
    assert [row[column].value for row in made["table-7"].grid.rows] == list(report_records.PAPER_WER)
    column = made["table-7"].grid.columns.index("ours, easiest layers first, test-clean")
    assert [row[column] and row[column].value for row in made["table-7"].grid.rows][:5] == [
        None,
        21.0,
        22.0,
        23.0,
        None,
    ]
    (timed,) = made["training"].grid.rows
    assert made["training"].grid.columns[3:] == ("not at all", "1 min", "10 min")
    assert [cell.value for cell in timed[3:]] == [15.5, 13.5, 12.5]
    splits = {row[0]: row for row in made["table-8"].grid.rows}
    assert (splits[8][2].value, splits[8][4].value) == (18.5, 18.0)  # neither joined nor at another temperature
    (line,) = made["duration"].charts[0].lines
    assert [x for x, _ in line.points] == [5, 30, 120, 600]
    assert made["temperature"].grid.columns[2:] == ("τ = 0.5", "τ = 0.01", "hard gates")
    assert [[cell.value for cell in row[2:]] for row in made["temperature"].grid.rows] == [[11.0, 11.0, 11.0]]
    assert [(row[2], row[3].value) for row in made["latency"].grid.rows] == [("1", 14.0), ("4", 11.0)]
    ((_, *choice, predicted, came),) = made["plan"].grid.rows
    assert (choice, predicted.value, came.value) == (["ladder, pyramid", "12", "as they are"], 1.9, 2.6)
    heard = {row[2]: row[3:] for row in made["cleaned"].grid.rows if row[0] == "runs/all"}
    assert list(heard) == ["white", "babble"]
    assert [cell.value for cell in heard["babble"]] == [7.0, 2.1, 1.2, 0.92, 0.85]
    assert [(r[3], r[4].value) for r in made["start-to-text"].grid.rows] == [("10", 0.9), ("3,600", 80.0)]
    assert made["peers"].grid.rows[1][3].around() == "38.00–40.00, 95 %"
    column = made["table-9"].grid.columns.index("ours, 12/12 lpa, fp32 over fp32")
    gains = [row[column] and row[column].value for row in made["table-9"].grid.rows]
    assert gains == [1 + 10 / 30, None, 3, None, 21]
    lpa = made["table-2"].grid.columns.index("ours, lpa, dB")
    assert [row[lpa] and row[lpa].value for row in made["table-2"].grid.rows] == [5.9, 6.2, 6.4, 6.8, None, None]
    assert made["table-11"].verdict.mark == REPRODUCED
    assert made["table-11"].grid.rows[-1][-1].value == 1200


def test_a_verdict_says_why(found):
    for records_ in (found, measured.load(ROOT / "results")):
        for item in (make(records_) for make in PAPER):
            assert all(v.why for v in item.verdicts() if v.mark in (DIFFERENT, IMPOSSIBLE)), item.id
            assert all(v.what for v in item.verdicts() if v.mark in (DIFFERENT, REPRODUCED)), item.id


def test_an_item_is_reproduced_only_where_both_halves_are():
    halves = {mark: Verdict(mark, "what", "why") for mark in (REPRODUCED, DIFFERENT, OURS)}
    assert Item("x", "x", "x", halves[REPRODUCED], also=[halves[DIFFERENT]]).mark() == DIFFERENT
    assert Item("x", "x", "x", halves[REPRODUCED], also=[halves[OURS]]).mark() == REPRODUCED


def test_both_halves_are_on_the_page(found):
    text = render(found)
    for half in ("speech recognition", "speech enhancement", "layers within chunks"):
        assert text.count(f"</span> ({half})") == 2  # at a glance, and with its table


def test_the_order_is_the_reason_only_where_it_puts_the_costly_layer_off(found):
    ours = {n: measured.Figure(wer, ("x-1",)) for n, wer in enumerate(report_records.ROWS)}
    steps = [r for r in found if "/step-" in r["model"] and r.get("config")]
    by_depth = [{**r, "config": {**r["config"], "order": "depth"}} for r in steps]
    by_depth[-1] = {**by_depth[-1], "figures": {"wer": 40.0}}  # the third layer, number 2, costs the most
    reason = "layer 2 alone costs 18 points; the sweep puts it behind these 3"
    assert reason not in why_ablation([*found, *by_depth], ours)  # its third, too
    swept = [r for r in found if r["kind"] == "sweep" and r["figures"]["layer"] == 2]
    hard = [{**r, "figures": {**r["figures"], "mse": 99.0}, "date": r["date"] + "x"} for r in swept]
    assert reason in why_ablation([*found, *by_depth, *hard], ours)


def test_a_reason_says_which_speakers_it_is_about(found):
    last = next(r for r in found if r["kind"] == "convert" and r["what"] == "step 10" and r["config"]["mixer"] == "lpa")
    timed = {**last, "what": "final", "figures": {**last["figures"], "training_steps": 1000}}
    start = (
        f"our model starts at {report_records.PAPER_WER[0]:.0f} % on held-out speakers, where the paper's starts at 3"
    )
    assert start in why_ablation([*found, timed], {})


def test_the_machine_is_named_once_where_there_is_one():
    grid = Grid(("model", "machine", "ms"), [["a", "here", 1], ["b", "here", 2]], ours=frozenset({2}))
    short, said = machine_below(grid)
    assert (short.columns, short.rows, short.ours) == (("model", "ms"), [["a", 1], ["b", 2]], {1})
    assert said == "All on here."
    several = Grid(("model", "machine"), [["a", "here"], ["b", "there"]])
    assert machine_below(several) == (several,)


def test_verdicts_follow_the_figures():
    def figures(values):
        return {n: measured.Figure(v, ("x-1",)) for n, v in enumerate(values)}

    assert judge_wall(figures(report_records.PAPER_WER)).mark == REPRODUCED
    flat = judge_wall(figures([9 + 0.1 * n for n in range(11)]))
    assert flat.mark == DIFFERENT
    assert "no wall" in flat.what
    assert judge_wall(figures([9, 10])).mark == MISSING
    assert judge_ablation(figures(report_records.ROWS)).mark == REPRODUCED
    worse = judge_ablation(figures((52, 30, 21, 18, 16, 17, 14, 14)))
    assert worse.mark == DIFFERENT
    assert "something lost by periodic and positional gates" in worse.what
    assert judge_sweep({n: 0.01 * 2**n for n in range(12)}).mark == REPRODUCED
    assert judge_sweep({n: 0.1 for n in range(12)}).mark == DIFFERENT


# --- the page


def test_every_number_links_to_its_record(found):
    text = render(found)
    made = re.findall(r'\bid="([^"]+)"', text)
    assert len(made) == len(set(made))
    assert {record["id"] for record in found} <= set(made)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(made)
    figures = sum(len(item.grid.figures()) for item in items(found).values() if item.grid)
    assert len(re.findall(r'<td class="[^"]*" data-v="[^"]*"><a href="#', text)) == figures > 50
    assert "one run" in text


def test_the_page_fetches_nothing_and_is_the_same_each_time(found):
    text = render(found)
    assert not re.search(r'(?:src|href)="(?!#|data:)|url\(|@import', text)
    assert text == render(found)


def test_what_a_record_holds_is_escaped(tmp_path):
    (tmp_path / "bench.jsonl").write_text(line(what="<script>alert(1)</script>", model="<b>", command="lpa '<i>'"))
    text = render(measured.load(tmp_path))
    assert text.count("<script>") == 1
    assert "<i>'" not in text


def test_a_commit_that_is_in_no_history_is_marked(tmp_path, tmp_path_factory, monkeypatch):
    def git(*arguments: str, at: Path = tmp_path) -> str:
        command = ["git", "-C", str(at), "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    results = tmp_path / "results"
    results.mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "kept")
    kept = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "to be rewritten")
    rewritten = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "--amend", "-m", "rewritten")  # the old one still lies about as an object
    commits = (kept, f"{kept[:7]}+dirty", rewritten, f"{rewritten}+dirty", "f" * 40)
    (results / "bench.jsonl").write_text("".join(line(commit=c) for c in commits))
    git("add", ".")
    git("commit", "-q", "-m", "records")
    (tmp_path / "README.md").write_text("")

    def made(folder: Path) -> str:
        page = report(tmp_path / "out", folder, tmp_path / "README.md")
        return page.read_text()

    text = made(results)
    assert "3 of 5 records name a commit that is not in this repository" in text
    assert text.count("<small>not in this repository</small>") == 3
    assert f"{rewritten[:10]} + changes</code><small>not in this repository" in text
    assert f"{kept[:10]}</code></td>" in text
    git("clone", "-q", "--depth", "1", tmp_path.as_uri(), "shallow")  # it does not hold all there is
    outside = shutil.copytree(results, tmp_path_factory.mktemp("outside") / "results")
    for elsewhere in (tmp_path / "shallow" / "results", outside):
        assert "not in this repository" not in made(elsewhere)
    monkeypatch.setenv("PATH", "")  # no git
    assert "not in this repository" not in made(results)


# --- the README


def test_the_readme_holds_what_the_records_say():
    """On a clean clone `lpa report` leaves the README as it is."""
    text = (ROOT / "README.md").read_text()
    assert "<!-- lpa report: layers -->" in text
    assert readme.rewrite(text, measured.load(ROOT / "results")) == text


def test_only_what_is_between_markers_changes(folder, found):
    text = "before\n<!-- lpa report: models -->\nold\n<!-- end -->\nafter\n<!-- lpa report: layers -->\n<!-- end -->\n"
    made = readme.rewrite(text, found)
    assert made.startswith("before\n<!-- lpa report: models -->\n| model | mixers |")
    assert "18.00 (17.50–18.50, 95 %)" in made
    assert "<!-- end -->\nafter\n<!-- lpa report: layers -->\n| frames (audio) | lpa |" in made
    assert readme.rewrite(made, found) == made


def test_the_readme_tells_of_speech_nobody_trained_on(found):
    table = readme.BLOCKS["models"](found)
    assert "test-clean" in table
    assert "dev-clean" not in table
    compared = readme.BLOCKS["conversions"](found)
    again = [{**r, "date": r["date"] + "x", "config": {**r["config"], "lr": 1.0}} for r in found if r.get("config")]
    assert readme.BLOCKS["conversions"]([*found, *again]) == compared  # of two trainings of one name the newest alone
    assert (
        "| wav2vec2-12 | pyramid of 196 windows, distilled | 8 of 12 |  | 11.60 (11.50–11.70, 3 seeds) | 11.50 ("
        in compared
    )
    assert "naive" not in compared  # no test-clean of it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- lpa report: nothing -->\n<!-- end -->", "no table 'nothing'"),
        ("<!-- lpa report: layers -->\n", "needs its"),
    ],
)
def test_wrong_markers_are_one_clear_line(text, message):
    with pytest.raises(LpaError, match=message):
        readme.rewrite(text, [])


def test_check_fails_on_drift_and_writes_nothing(folder, tmp_path):
    file = tmp_path / "README.md"
    file.write_text("![](docs/headline.svg)\n<!-- lpa report: layers -->\nby hand\n<!-- end -->\n")

    def run(*options):
        command = [sys.executable, "-m", "lpa", "report", "--results", str(folder), "--readme", str(file), *options]
        return subprocess.run(
            [*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, check=False
        )

    drift = run("--check")
    assert drift.returncode == 1
    assert drift.stderr.startswith(f"lpa: {file} is not what ")
    assert "by hand" in file.read_text()
    assert not (tmp_path / "out").exists()
    assert run().returncode == 0
    assert (tmp_path / "out" / "index.html").is_file()
    assert run("--check").returncode == 0
    picture = tmp_path / "docs" / "headline.svg"
    assert picture.read_text().count("<polyline") == 2  # the paper, and its recipe here
    picture.write_text("by hand")
    assert run("--check").stderr.startswith(f"lpa: {picture} is not what ")


def test_report_needs_no_torch(folder, tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    code = "import sys; from pathlib import Path; from lpa.report import report; "
    code += f"report(Path({str(tmp_path)!r}), Path({str(folder)!r}), Path({str(tmp_path / 'README.md')!r})); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules, 'matplotlib' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False False"


def test_report_writes_beside_the_page_only(folder, tmp_path):
    file = tmp_path / "README.md"
    file.write_text("no markers\n")
    assert report(tmp_path / "out", folder, file) == tmp_path / "out" / "index.html"
    assert file.read_text() == "no markers\n"
