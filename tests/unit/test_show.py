"""What `lpa show` draws is what the layers do: its maps, times the values, are the mixers' outputs."""

import base64
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import make

from lpa.bench import random_attention
from lpa.errors import LpaError
from lpa.mixers import LPA, MIXERS, build
from lpa.mixers.lpa import LPAConfig
from lpa.show import legend, looks, pulses, show
from lpa.show.pulses import Pulse
from lpa.show.scene import Scene
from lpa.surgery import mixer_at, save, swap

CLIP = str(Path(__file__).parents[1] / "data" / "librivox" / "austen-0870.flac")
FRAMES, DIM = 203, 32


def layer(name: str, **config):
    """A mixer with weights spread out, and frames to mix."""
    torch.manual_seed(0)
    mixer = build(name, random_attention(DIM, 4), config).eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer, torch.randn(1, FRAMES, DIM)


def gathered(heads: torch.Tensor, values: torch.Tensor, out) -> torch.Tensor:
    """(H, T, T) and values (T, D) → what a layer with these looks puts out."""
    return out(torch.einsum("hts,she->the", heads, values.unflatten(-1, (len(heads), -1))).flatten(1))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(
            ("anchored", {}),
            ("ladder", {}),
            ("lpa", {}),
            ("lpa", {"hard": True}),
            ("lpa", {"ladder": 4, "anchored": 2}),
        ),
        *(("window", {"side": 9}), ("pyramid", {}), ("pyramid", {"right": 20}), ("dynconv", {})),
        *(("window", {"side": 9, "places": True}), ("pyramid", {"places": True})),
    ],
)
@torch.no_grad()
def test_looks_give_the_mixers_output(name, config):
    mixer, x = layer(name, **config)
    if isinstance(mixer, LPA):
        heads, values = looks.lpa_looks(mixer, x, None)[0], mixer.value(x)[0]
    elif name == "dynconv":
        heads, values = looks.dynconv_looks(mixer, x), mixer.value(x)[0]
    else:
        heads = looks.window_looks(mixer, x) if name == "window" else looks.pyramid_looks(mixer, x)[0]
        values = mixer.project(x)[1].chunk(2, -1)[1][0]
    torch.testing.assert_close(gathered(heads, values, mixer.out), mixer(x).y[0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_pyramid_s_pulses_are_all_it_takes():
    mixer, x = layer("pyramid", right=20)
    heads, found = looks.pyramid_looks(mixer, x)
    assert [p.kind for p in found] == ["block", *2 * (4 * ["piece"] + 4 * ["wide"])]
    torch.testing.assert_close(sum(p.used for p in found), torch.ones(FRAMES))
    for frame in (0, 50, FRAMES - 1):
        spans = [span for p in found for span in p.at(frame)]
        seen = torch.zeros(FRAMES)
        for a, b in spans:
            seen[int(a) : int(b)] += 1
        assert torch.equal(seen, (heads[:, frame].sum(0) > 0).float())  # they lie side by side, over all it sees
    assert len(pulses.lay_out(found)) == 3  # so that a line a kind is enough


@torch.no_grad()
@pytest.mark.parametrize("name", ["ladder", "anchored"])
def test_pulses_that_go_along_lie_where_the_layer_looks(name):
    mixer, x = layer(name)
    heads, found = looks.lpa_looks(mixer, x, None)
    assert {p.kind for p in found} == {name}
    assert len(found) == (1 if name == "ladder" else mixer.heads) * mixer.in_frame  # all heads share a ladder's
    for frame in (0, 100, FRAMES - 1):
        spans = [span for p in found for span in p.at(frame)]
        looked = heads[:, frame].abs().sum(0).nonzero()[:, 0]
        assert min(int(a) for a, _ in spans) == int(looked.min())
        assert max(int(np.ceil(b)) for _, b in spans) == int(looked.max()) + 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "pyramid", "lpa", "ladder", "dynconv"])
def test_difficulty_is_what_a_shorter_look_loses(name):
    mixer, x = layer(name)
    told = [looks.look(mixer, (x,), {}, None, near)[2] for near in (0, 4, 20, FRAMES)]
    assert told == sorted(told, reverse=True)
    assert 0.01 < told[0] <= 1
    assert told[-1] == pytest.approx(0, abs=1e-6)


@torch.no_grad()
def test_difficulty_of_attention_is_what_a_window_misses():
    attention = random_attention(DIM, 4)
    x = torch.randn(1, FRAMES, DIM, generator=torch.Generator().manual_seed(0))
    whole, short = (build("window", attention, {"side": side})(x).y[0] for side in (FRAMES, 7))
    told = looks.look(attention, (x,), {}, None, 7)[2]
    assert told == pytest.approx(looks.lost(whole, short), abs=1e-4)


@torch.no_grad()
def test_looks_of_convolution_and_of_attention():
    mixer, x = layer("conv")
    mixer.kernel.copy_(mixer.kernel[:1].abs().expand_as(mixer.kernel))  # as the picture has them: one for all channels
    (taps,) = looks.conv_looks(mixer, x)
    torch.testing.assert_close(mixer.out(taps @ mixer.v(x)[0]), mixer(x).y[0], atol=2e-5, rtol=1e-4)
    attention = random_attention(DIM, 4)
    heads = looks.attention_looks(attention, x)
    expected = build("window", attention, {"side": FRAMES})(x).y[0]  # a window over everything
    torch.testing.assert_close(
        gathered(heads, attention.v_proj(x)[0], attention.out_proj), expected, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_can_be_drawn(name):
    model = make("whisper", layers=1)
    swap(model, 0, name)
    _, (one,) = looks.study(model, 0.3 * torch.randn(1, 8000))
    assert one.mixer == name
    assert one.weight.shape == (25, 25)
    assert bool(one.weight.any()) is (name != "none")
    assert one.away <= (one.reach[0] if one.reach else 25)


@pytest.mark.parametrize("case", ["wav2vec2", "wavlm", "whisper"])
def test_every_layer_of_a_model_is_studied(case):
    model = make(case, layers=2)
    swap(model, 1, "lpa")
    audio = 0.3 * torch.randn(1, 12000, generator=torch.Generator().manual_seed(0))
    before = model(audio).last
    logits, (attention, replaced) = looks.study(model, audio)
    frames = model.frames(12000)
    assert logits.shape[0] == frames == len(attention.weight) == len(replaced.weight)
    torch.testing.assert_close(attention.weight.sum(1), torch.ones(frames))  # shares of one
    assert (attention.mixer, replaced.mixer) == ("attention", "lpa")
    config: LPAConfig = mixer_at(model, 1).config
    drawn = [p for line in replaced.lines for p in line]
    assert replaced.pulses == config.heads * 12 >= len(drawn)
    assert (attention.pulses, attention.lines) == (0, [])
    assert {p.kind for p in drawn} == set(looks.IN_RECORDING)
    assert all(0 <= a < b <= frames for p in drawn for a, b in p.runs)
    assert 0 < attention.worth <= 1
    assert 0 < replaced.worth <= 1
    assert torch.equal(model(audio).last, before)  # no hook stays behind


def test_what_a_layer_is_worth():
    model = make("whisper", layers=1)
    swap(model, 0, "none")
    _, (nothing,) = looks.study(model, 0.3 * torch.randn(1, 8000))
    assert nothing.worth == pytest.approx(0, abs=1e-5)  # it mixes nothing, so nothing is lost without it
    assert nothing.away == 0


def test_runs():
    assert pulses.runs(torch.tensor([1, 1, 0, 1, 0, 0, 1]).bool()) == [(0, 2), (3, 4), (6, 7)]
    assert pulses.runs(torch.tensor([0, 0]).bool()) == []


def fixed(kind: str, used: float, *runs: tuple[int, int]) -> Pulse:
    return Pulse(kind, torch.full((30,), float(used)), list(runs))


def test_a_pulse_tells_its_width_and_pace():
    pulse = fixed("periodic", 1.0, (0, 2), (5, 9), (12, 16), (19, 23))
    assert (pulse.width, pulse.pace) == (4, 7)  # not the first, which the start cuts short
    assert fixed("aperiodic", 1.0, (3, 8)).pace is None
    along = Pulse("ladder", torch.ones(30), [], pulses.within(torch.arange(30) - 4, torch.arange(30) - 1))
    assert (along.at(0), along.at(10), along.width) == ([], [(6, 9)], 3)


def test_lines_hold_what_never_overlaps():
    narrow, beside, over = (fixed("aperiodic", u, r) for u, r in ((3, (0, 4)), (2, (4, 9)), (1, (3, 20))))
    other, shut = fixed("positional", 9, (25, 30)), fixed("positional", 9)
    assert pulses.lay_out([other, shut, over, beside, narrow]) == [[narrow, beside], [over], [other]]
    many = [fixed("periodic", used, (0, 9)) for used in range(20)]
    assert [line[0].used[0] for line in pulses.lay_out(many)] == [19, 18, 17, 16, 15, 14]  # the strongest


def test_text_is_under_every_line_or_under_every_kind():
    a, b = [fixed("aperiodic", 1, (0, 4))], [fixed("periodic", 1, (0, 4))]
    assert pulses.text_rows([]) == []
    assert pulses.text_rows([a, a, b, b, b]) == 5 * [True]
    assert pulses.text_rows([a, a, b, b, b, b]) == [False, True, False, False, False, True]


@pytest.mark.parametrize("seconds", [0.1, 0.9, 7.1, 30])
def test_ticks(seconds):
    times = legend.ticks(seconds)
    assert 2 <= len(times) <= 9
    assert times[0] == (0, "0 s")
    assert times[-1][0] <= seconds
    assert all(float(told.removesuffix(" s")) == t for t, told in times)


def test_percent():
    assert [legend.percent(x) for x in (0.0, 0.0001, 0.002, 0.014, 1.0)] == ["0 %", "0 %", "under 1 %", "1 %", "100 %"]


def test_facts_of_a_layer():
    def facts(name: str, **config):
        model = make("whisper", layers=1)
        swap(model, 0, name, config)
        layers = looks.study(model, 0.3 * torch.randn(1, 16000))[1]
        return Scene("", "", np.zeros(1), 16000, 50, 1.0, (), layers, {}).facts(layers[0])

    assert facts("none") == ["gathers nothing"]
    assert facts("window", side=5)[1:] == ["sees −0.10 to +0.10 s"]
    assert facts("summary")[1:] == ["sees all of it", "its difficulty cannot be told"]
    assert re.fullmatch(r"\d+ of 48 pulses, \d\.\d\d to \d\.\d\d s wide", facts("lpa")[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    model = make("wav2vec2", layers=2)
    swap(model, 1, "pyramid")
    return save(model, tmp_path_factory.mktemp("show") / "model")


def read_data(text: str) -> dict:
    return json.loads(re.search(r"^const data = (.*);$", text, re.M)[1])


def test_html_holds_all_of_it(folder, tmp_path):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"layers": [{"layer": 0, "relative": 0.25}]}))
    out = show(CLIP, str(folder), tmp_path / "a" / "clip.html", seconds=2, sweep=sweep)
    text = out.read_text()
    data = read_data(text)
    assert [x["mixer"] for x in data["layers"]] == ["attention", "pyramid"]
    assert [[name for name, *_ in x["shares"]] for x in data["layers"]] == [
        ["difficulty", "importance", "swept"],
        ["difficulty", "importance"],
    ]
    assert data["layers"][0]["shares"][2] == ["swept", 0.25, "25 %"]
    assert legend.SWEPT.split("`")[1] in text
    assert html.escape(legend.SWEPT.split("`")[0]) in text
    assert legend.UNSWEPT.split("`")[0] not in text
    assert "austen-0870.flac, 0 to 2 s of 7 s" in text
    assert data["seconds"] == pytest.approx(2, abs=0.05)
    assert "data:audio/wav;base64," in text
    assert "{{" not in re.sub(r"^const data.*$", "", text, flags=re.M)
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)  # nothing is fetched
    kinds = {pulse["kind"] for line in data["layers"][1]["lines"] for pulse in line}
    assert kinds == {"block", "piece", "wide"} == set(re.findall(r"<li style=\"color: var\(--(\w+)\)", text))
    assert all(text.count(f"--{kind}: #") == 2 for kind in kinds)  # on light and on dark ground
    assert data["layers"][0]["lines"] == []


def test_html_has_the_pulses_where_they_are(folder, tmp_path):
    out = show(CLIP, str(folder), tmp_path / "clip.html", seconds=2)
    layer = read_data(out.read_text())["layers"][1]
    (block,) = layer["lines"][0]
    edges = np.frombuffer(base64.b64decode(block["edges"]), "<u2").reshape(-1, 2) / 65535
    used = np.frombuffer(base64.b64decode(block["used"]), "u1")
    rows = (np.arange(layer["rows"]) + 0.5) / layer["rows"]
    assert len(edges) == len(used) == layer["rows"]
    assert ((edges[:, 0] <= rows) & (rows <= edges[:, 1])).all()  # a moment lies in its own block
    assert used.max() > 0
    assert legend.UNSWEPT.split("`")[0] in out.read_text()  # how to get what is not there


def test_png(folder, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    out = show(CLIP, str(folder), tmp_path / "clip.png", start=1, seconds=1)
    pixels = image.imread(out)
    assert pixels.shape[1] == 13 * 130
    colours = {tuple(colour) for colour in (255 * pixels[..., :3]).round().astype(int).reshape(-1, 3)}
    for kind in ("block", "piece", "wide"):
        light = legend.PULSES[kind].light
        assert tuple(int(light[i : i + 2], 16) for i in (1, 3, 5)) in colours, kind


@pytest.mark.parametrize("mixer", ["lpa", "ladder", "pyramid"])
def test_widths_in_a_png_lie_on_nothing(tmp_path, monkeypatch, mixer):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept: list = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    model = make("wav2vec2", layers=2)
    swap(model, 1, mixer)
    show(CLIP, str(save(model, tmp_path / "model")), tmp_path / "clip.png", seconds=3)
    (figure,) = kept
    drawn = []
    for axis in figure.axes:
        widths = [text.get_window_extent() for text in axis.texts if text.get_gid() == "width"]
        bars = [path.get_extents(axis.transData) for c in axis.collections for path in c.get_paths()]
        lines = [line.get_window_extent() for line in axis.lines]
        for i, box in enumerate(widths):
            assert axis.bbox.x0 - 1 <= box.x0 < box.x1 <= axis.bbox.x1 + 1
            assert axis.bbox.y0 - 1 <= box.y0
            assert not any(box.overlaps(other) for other in [*widths[:i], *bars, *lines])
        drawn += widths
    assert len(drawn) >= {"lpa": 3, "ladder": 3, "pyramid": 4}[mixer]
    assert not any("`" in text.get_text() for axis in figure.axes for text in axis.texts)


@pytest.fixture
def sounds(tmp_path) -> Path:
    """Files that nothing can be shown of."""
    rate = 16000
    soundfile.write(tmp_path / "silent.wav", np.zeros(rate), rate)
    soundfile.write(tmp_path / "short.wav", np.full(rate // 20, 0.5), rate)
    (tmp_path / "broken.wav").write_bytes(b"RIFF and nothing more")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "clip.svg"}, "no picture"),
        ({"start": 100}, "has less than 0.1 s after 100 s; give a smaller --start"),
        ({"start": -1}, "start must be 0 or more"),
        ({"seconds": 31}, "up to 30"),
        ({"seconds": 0}, "from 0.1"),
        ({"file": "nowhere.wav"}, "nowhere.wav is not there"),
        ({"file": "broken.wav"}, "broken.wav cannot be read as audio"),
        ({"file": "silent.wav"}, "silent.wav is silent; there is nothing to show"),
        ({"file": "short.wav"}, "short.wav has less than 0.1 s"),
        ({"sweep": Path("nowhere")}, "holds no finished sweep"),
        ({"out": "folder.html"}, "is a folder"),
    ],
)
def test_errors_are_one_clear_line(folder, sounds, arguments, message):
    given = {"file": CLIP, "model": str(folder), "seconds": 1, **arguments}
    (sounds / "folder.html").mkdir()
    out = sounds / given.pop("out", "clip.html")
    with pytest.raises(LpaError, match=message) as error:
        show(str(sounds / given.pop("file")), given.pop("model"), out, **given)
    assert "\n" not in str(error.value)
    assert not out.is_file()


def test_a_sweep_of_another_model(folder, tmp_path):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"layers": [{"layer": 7, "relative": 0.25}]}))
    with pytest.raises(LpaError, match=r"the sweep is of another model: .* has no layer 7"):
        show(CLIP, str(folder), tmp_path / "clip.html", seconds=1, sweep=sweep)


@pytest.mark.parametrize("ending", ["html", "png"])
def test_no_words_is_an_error_with_a_picture(tmp_path, ending):
    if ending == "png":
        pytest.importorskip("matplotlib")
    model = make("wav2vec2", layers=1)
    with torch.no_grad():
        model.net.lm_head.weight.zero_()
        model.net.lm_head.bias.zero_()
        model.net.lm_head.bias[model.tokens.blank] = 1  # it hears nothing but blanks
    out = tmp_path / f"clip.{ending}"
    with pytest.raises(
        LpaError, match=rf"no words are heard in austen-0870.flac, 0 to 1 s of 7 s; .*clip.{ending} shows"
    ):
        show(CLIP, str(save(model, tmp_path / "model")), out, seconds=1)
    assert out.stat().st_size > 10000
    assert ending == "png" or "no words heard" in out.read_text()
