"""The evidence page and the gate inspector in a real browser: Debian's chromium, driven by Playwright."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "tests" / "data" / "librivox" / "austen-0870.flac"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHARTS = (
    "layers",
    "duration",
    "speed",
    "gain",
    "memory",
    "roofline",
    "ablation",
    "sepformer",
    "sweep",
    "gates-1",
    "training",
)
NOWHERE = """[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))
    .filter(target => !document.getElementById(target.slice(1)))"""
sys.path.append(str(ROOT / "tests" / "unit"))  # for the records and the small models

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it drives the browser")
if CHROMIUM is None:
    pytest.skip("chromium is not installed; with Debian: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Path:
    """The page of records of every kind."""
    import report_records

    from lpa.report import report

    folder = tmp_path_factory.mktemp("evidence")
    readme = folder / "README.md"
    readme.write_text("")
    return report(folder, report_records.write(folder / "results"), readme)


class Visit:
    """A page that is open, and whatever went wrong on it."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light"):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else self.faults.append(r.url))
        self.page.goto(path.as_uri())

    def __enter__(self):
        return self.page

    def __exit__(self, kind, *_):
        self.page.close()
        if kind is None:
            assert not self.faults


def follow(page, numbers: str) -> None:
    """Click the last of the numbers: its record is there to see, below the heading that stays."""
    number = page.locator(numbers).last
    target = number.get_attribute("href")
    number.click()
    row = page.locator(target)
    assert "lpa" in row.inner_text() or "pytest" in row.inner_text()  # the command that wrote it
    assert page.evaluate("location.hash") == target
    head, link = page.locator("#records th").first.bounding_box(), row.locator("a").bounding_box()
    assert head["y"] + head["height"] <= link["y"] < 900 - link["height"]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_every_figure_is_there(browser, evidence, width, scheme):
    with Visit(browser, evidence, width, scheme) as page:
        for name in CHARTS:
            box = page.locator(f"#chart-{name} > svg").bounding_box()
            assert box["width"] > 250, name
            assert box["height"] > 140, name
            marks = page.locator(f"#chart-{name} > svg :is(polyline, rect)")
            assert marks.count() > 0, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll by themselves


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_repository_s_own_page_opens(browser, tmp_path, width, scheme):
    from lpa.report import report

    (tmp_path / "README.md").write_text("")
    with Visit(browser, report(tmp_path, ROOT / "results", tmp_path / "README.md"), width, scheme) as page:
        assert page.locator("#records tbody tr").count() > 10
        assert all(page.locator(f"#chart-{name}").count() == 1 for name in CHARTS)
        for name in (*(f"table-{n}" for n in range(1, 12)), *(f"figure-{n}" for n in range(1, 5))):
            shown = page.locator(f"#{name} .body :is(tbody tr, figure > svg)")
            assert shown.count() >= 3 if name.startswith("table") else shown.count() >= 2, name
            assert shown.first.bounding_box()["width"] > 250, name
        assert page.evaluate(NOWHERE) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        follow(page, "#table-11 td.mine a")


@pytest.mark.parametrize("width", [1280, 390])
def test_links_lead_somewhere(browser, evidence, width):
    with Visit(browser, evidence, width) as page:
        assert page.evaluate(NOWHERE) == []
        follow(page, "#table-7 td.mine a")


def test_tables_sort(browser, evidence):
    with Visit(browser, evidence) as page:
        table = page.locator("#table-6 table")
        button = table.locator("th button").nth(3)

        def values() -> list[float]:
            return [float(v) for v in table.locator("td:nth-child(4)").evaluate_all("c => c.map(x => x.dataset.v)")]

        before = values()
        button.click()
        up = values()
        button.click()
        assert sorted(before) == up != before
        assert values() == up[::-1]
        assert table.locator("th").nth(3).get_attribute("aria-sort") == "descending"
        first, empty = page.locator("#table-7 tbody tr").first.locator("td"), "#table-7 td:nth-child({}):empty"
        gap = next(n for n in range(1, first.count() + 1) if page.locator(empty.format(n)).count())
        page.locator("#table-7 th button").nth(gap - 1).click()  # a column with a gap: what is not there goes last
        assert page.locator("#table-7 tbody tr").last.locator("td").nth(gap - 1).inner_text() == ""
        page.evaluate("document.querySelectorAll('th button').forEach(b => b.click())")  # none fails


def test_the_theme_changes(browser, evidence):
    with Visit(browser, evidence) as page:
        colour = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(colour)
        page.locator("#theme").click()
        dark = page.evaluate(colour)
        assert light != dark
        page.locator("#theme").click()
        assert page.evaluate(colour) == light
    with Visit(browser, evidence, scheme="dark") as page:
        assert page.evaluate(colour) == dark


@pytest.mark.parametrize("width", [1280, 390])
def test_the_gate_inspector(browser, tmp_path, width):
    pytest.importorskip("torch")
    from tiny_models import make

    from lpa.show import show
    from lpa.surgery import save, swap

    model = make("wav2vec2", layers=3)
    swap(model, 1, "pyramid")
    swap(model, 2, "lpa")
    out = show(str(CLIP), str(save(model, tmp_path / "model")), tmp_path / "clip.html", seconds=3)
    with Visit(browser, out, width) as page:
        assert (
            page.locator("audio").evaluate(
                "a => new Promise(r => a.duration ? r(a.duration) : a.onloadedmetadata = () => r(a.duration))"
            )
            == 3
        )
        assert page.locator(".label").all_inner_texts()[-1].startswith("Layer 2 lpa")
        canvases = page.locator("canvas")
        assert canvases.count() == 1 + 2 * 3
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        assert all(canvases.nth(i).evaluate(drawn) for i in range(7))
        picture = "c => c.toDataURL()"
        strip = page.locator(".strip canvas").nth(1)
        before = strip.evaluate(picture)
        strip.hover(position={"x": 20, "y": 20})
        assert strip.evaluate(picture) != before  # it shows where that moment looks
        assert page.evaluate("document.documentElement.scrollWidth") <= width
