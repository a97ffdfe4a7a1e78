"""The gate inspector's page in a real browser: it is all there, and it answers to pointer, words and playback."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "tests" / "data" / "librivox" / "austen-0870.flac"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRAWN = """{  // what a canvas has on it: rectangles, and texts with their boxes
  const pen = CanvasRenderingContext2D.prototype, wipe = pen.clearRect, fill = pen.fillRect, write = pen.fillText;
  pen.clearRect = function (...box) { this.canvas.drawn = { rects: [], texts: [] }; wipe.apply(this, box); };
  pen.fillRect = function (...box) { this.canvas.drawn?.rects.push([this.fillStyle, ...box]); fill.apply(this, box); };
  pen.fillText = function (text, x, y) {
    const size = this.measureText(text), left = x - size.actualBoundingBoxLeft, top = y - size.actualBoundingBoxAscent;
    const box = [left, top, x + size.actualBoundingBoxRight - left, y + size.actualBoundingBoxDescent - top];
    this.canvas.drawn.texts.push([text, ...box]); write.call(this, text, x, y);
  };
}"""
INK = "c => Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)"
sys.path.append(str(ROOT / "tests" / "unit"))  # for the small models

pytest.importorskip("torch")
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
def picture(tmp_path_factory) -> Path:
    """Of a model with attention, the paper's pulses, and pulses of each other kind."""
    from tiny_models import make

    from lpa.show import show
    from lpa.surgery import save, swap

    folder = tmp_path_factory.mktemp("show")
    model = make("wav2vec2", layers=6)
    for layer, mixer in enumerate(("lpa", "ladder", "anchored", "pyramid", "window"), start=1):
        swap(model, layer, mixer)
    return show(str(CLIP), str(save(model, folder / "model")), folder / "clip.html", seconds=3)


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")], ids=str)
def page(request, browser, picture):
    """The picture, open; whatever goes wrong on it fails the test."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(r.url))
    page.add_init_script(DRAWN)
    page.goto(picture.as_uri())
    yield page
    page.close()
    assert not faults


def colours(page, canvas) -> set[tuple[int, int, int]]:
    data = canvas.evaluate(INK)
    return set(zip(data[0::4], data[1::4], data[2::4], strict=True))


def test_every_layer_has_a_strip_and_a_square_side_by_side(page):
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    strips, squares = page.locator(".strip canvas"), page.locator(".map canvas")
    assert strips.count() == squares.count() == page.locator(".label").count() - 1 == 6
    for i in range(6):
        strip, square = strips.nth(i).bounding_box(), squares.nth(i).bounding_box()
        assert strip["width"] > 0.5 * width
        assert strip["x"] + strip["width"] <= square["x"]
        assert square["width"] == pytest.approx(square["height"], abs=1)
        assert square["width"] < 0.25 * width
        assert abs(strip["y"] - square["y"]) < 2


def test_pulses_are_drawn_in_the_colours_of_the_legend(page):
    told = page.locator("li").evaluate_all(
        "all => all.map(li => [li.querySelector('b').innerText, getComputedStyle(li).color])"
    )
    assert len(told) == 9
    legend = {kind: tuple(int(part) for part in colour[4:-1].split(",")) for kind, colour in told}
    kinds = (
        set(),
        {"aperiodic", "periodic", "positional"},
        {"ladder"},
        {"anchored"},
        {"block", "piece", "wide"},
        {"window"},
    )
    for i, here in enumerate(kinds):
        drawn = colours(page, page.locator(".strip canvas").nth(i))
        strongest = {kind for kind, colour in legend.items() if colour in drawn}
        assert strongest <= here  # what is faint is drawn paler
        assert bool(strongest) is bool(here)


def clear(one, other) -> bool:
    """Two boxes: left, top, width, height."""
    (a, b, c, d), (e, f, g, h) = one, other
    return a + c <= e or e + g <= a or b + d <= f or f + h <= b


@pytest.mark.parametrize("moment", [0.02, 0.3, 0.5, 0.77, 0.98])
def test_widths_lie_on_nothing(page, moment):
    page.evaluate(f"mark({moment})")
    shade = page.evaluate("colour('--shade')")
    told = []
    for canvas in page.locator(".strip canvas").all():
        drawn = canvas.evaluate("c => ({ ...c.drawn, width: c.clientWidth, height: c.clientHeight })")
        bars = [box for colour, *box in drawn["rects"] if colour != shade]  # and the line that marks the moment
        texts = [box for _, *box in drawn["texts"]]
        for i, box in enumerate(texts):
            assert 0 <= box[0] < box[0] + box[2] <= drawn["width"]
            assert 0 <= box[1] < box[1] + box[3] <= drawn["height"]
            assert all(clear(box, other) for other in [*texts[:i], *bars])
        told.append(len(texts))
    assert told[0] == 0
    assert told[1] >= 2  # the paper's pulses: of three kinds, unless a text has room on neither side of the line
    assert all(told[2:])


def test_a_share_is_on_one_line(page):
    told = page.locator(".share em").first
    height = told.bounding_box()["height"]
    told.evaluate("e => { e.textContent = 'under 1 %'; }")
    assert told.bounding_box()["height"] == height
    assert told.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_words_lie_inside_and_beside_each_other(page):
    box = page.locator("#words").bounding_box()
    words = [word.bounding_box() for word in page.locator("#words span").all()]
    assert words
    for i, one in enumerate(words):
        assert one["x"] >= box["x"] - 1
        assert one["x"] + one["width"] <= box["x"] + box["width"] + 1
        for other in words[:i]:
            apart = one["x"] >= other["x"] + other["width"] or other["x"] >= one["x"] + one["width"]
            assert apart or abs(one["y"] - other["y"]) > 8


def test_pointing_marks_a_moment_everywhere(page):
    now, mark, strip = page.locator("#now"), page.locator(".map i").nth(5), page.locator(".strip canvas").nth(5)
    box = strip.bounding_box()

    def state() -> tuple:
        return now.inner_text(), mark.evaluate("m => m.style.top"), strip.evaluate("c => c.toDataURL()")

    strip.hover(position={"x": box["width"] / 4, "y": 20})
    assert "0.7" in now.inner_text()  # a quarter of three seconds
    before = state()
    strip.hover(position={"x": box["width"] / 2, "y": 20})
    assert all(a != b for a, b in zip(before, state(), strict=True))
    page.locator(".map canvas").nth(0).hover(position={"x": 5, "y": 5})
    assert float(mark.evaluate("m => parseFloat(m.style.top)")) < 15  # down the square is time


def test_a_word_takes_the_recording_there(page):
    word = page.locator("#words span").last
    word.click()
    start, end = (float(part) for part in word.get_attribute("title").removesuffix(" s").split(" to "))
    player = page.locator("audio")
    assert start <= player.evaluate("a => a.currentTime") <= end
    assert "on" in (word.get_attribute("class") or "")


def test_playing_moves_the_mark(page):
    page.locator("audio").evaluate("a => { a.muted = true; return a.play(); }")
    page.wait_for_function("document.querySelector('audio').currentTime > 0.2")
    page.locator("audio").evaluate("a => a.pause()")
    marked = "parseFloat(document.querySelector('.map i').style.top) / 100 * data.seconds"
    page.wait_for_function(f"Math.abs({marked} - document.querySelector('audio').currentTime) < 0.15")
