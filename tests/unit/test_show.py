"""What `lpa show` draws is what the layers do: its maps, times the values, are the mixers' outputs."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_models import make

from lpa.bench import random_attention
from lpa.errors import LpaError
from lpa.mixers import LPA, MIXERS, build
from lpa.mixers.lpa import LPAConfig
from lpa.show import looks, show
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
        function = {"window": looks.window_looks, "pyramid": looks.pyramid_looks}[name]
        heads, values = function(mixer, x), mixer.project(x)[1].chunk(2, -1)[1][0]
    torch.testing.assert_close(gathered(heads, values, mixer.out), mixer(x).y[0], atol=2e-5, rtol=1e-4)


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
    logits, (attention, pulses) = looks.study(model, audio)
    frames = model.frames(12000)
    assert logits.shape[0] == frames == len(attention.weight) == len(pulses.weight)
    torch.testing.assert_close(attention.weight.sum(1), torch.ones(frames))  # shares of one
    assert (attention.mixer, pulses.mixer) == ("attention", "lpa")
    config: LPAConfig = mixer_at(model, 1).config
    assert len(pulses.pulses) == config.heads * 12
    assert not attention.pulses
    assert {p.family for p in pulses.pulses} == set(looks.FAMILIES)
    assert all(0 <= a < b <= frames for p in pulses.pulses for a, b in p.runs)
    assert 0 < attention.worth <= 1
    assert 0 < pulses.worth <= 1
    assert torch.equal(model(audio).last, before)  # no hook stays behind


def test_what_a_layer_is_worth():
    model = make("whisper", layers=1)
    swap(model, 0, "none")
    _, (nothing,) = looks.study(model, 0.3 * torch.randn(1, 8000))
    assert nothing.worth == pytest.approx(0, abs=1e-5)  # it mixes nothing, so nothing is lost without it
    assert nothing.away == 0


def test_runs():
    assert looks.runs(torch.tensor([1, 1, 0, 1, 0, 0, 1]).bool()) == [(0, 2), (3, 4), (6, 7)]
    assert looks.runs(torch.tensor([0, 0]).bool()) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    model = make("wav2vec2", layers=2)
    swap(model, 1, "pyramid")
    return save(model, tmp_path_factory.mktemp("show") / "model")


def test_html_holds_all_of_it(folder, tmp_path):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"layers": [{"layer": 0, "relative": 0.25}]}))
    out = show(CLIP, str(folder), tmp_path / "a" / "clip.html", seconds=2, sweep=sweep)
    text = out.read_text()
    data = json.loads(re.search(r"^const data = (.*);$", text, re.M)[1])
    assert [x["mixer"] for x in data["layers"]] == ["attention", "pyramid"]
    assert [x["swept"] for x in data["layers"]] == [0.25, None]
    assert data["seconds"] == pytest.approx(2, abs=0.05)
    assert "data:audio/wav;base64," in text
    assert "{{" not in re.sub(r"^const data.*$", "", text, flags=re.M)
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)  # nothing is fetched


def test_png(folder, tmp_path):
    pytest.importorskip("matplotlib")
    out = show(CLIP, str(folder), tmp_path / "clip.png", start=1, seconds=1)
    assert out.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out": "clip.svg"}, "no picture"),
        ({"start": 100}, "ends before 100 s"),
        ({"seconds": 31}, "up to 30"),
        ({"file": "nowhere.wav"}, "nowhere.wav is not there"),
    ],
)
def test_errors_are_one_clear_line(folder, tmp_path, arguments, message):
    given = {"file": CLIP, "model": str(folder), "seconds": 1, **arguments}
    with pytest.raises(LpaError, match=message) as error:
        show(given.pop("file"), given.pop("model"), tmp_path / given.pop("out", "clip.html"), **given)
    assert "\n" not in str(error.value)
