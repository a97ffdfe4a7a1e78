"""Exact streaming: one pass = blocks = a live stream = a batch = alone, how far a model hears, and how far it may."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_cases import shake
from tiny_models import make

import lpa
from lpa import audio, cli
from lpa.errors import LpaError
from lpa.mixers import MIXERS, build, resolve
from lpa.plan import Swap
from lpa.run import open_model
from lpa.run.field import Field, Layer, limit_ahead, mixer_layer
from lpa.run.torch import TorchListener, limit_lookahead
from lpa.stream import Blocks, Words, file_frames, stream
from lpa.surgery import mixer_at, save, swap
from lpa.transcribe import transcribe

CLIP = next((Path(__file__).parents[1] / "data" / "librivox").glob("*.flac"))
SMALL = {
    "anchored": {"reach": 9},
    "ladder": {"reach": 7, "heads": 4},
    "window": {"side": 5, "block": 4},
    "conv": {"taps": 5},
    "dynconv": {"taps": 7, "heads": 4},
    "none": {},
    "pyramid": {"block": 4, "pieces": [1, 1, 2], "steps": [1, 2]},
}
LIMITED = {"anchored": 2, "ladder": 3, "window": 1, "pyramid": 2}  # a right limit for those that take one
BOUNDED_WAVE = {"feat_extract_norm": "layer", "normalise": False}
BACK = {"whisper": ("whisper-fixed-floor", {}), "wave": ("wav2vec2-stable", BOUNDED_WAVE)}
BACK["stack"] = ("data2vec-audio", {"normalise": False})


def converted(case: str, mixers: list[str], limited: bool = False):
    """A small model of bounded reach with these mixers, moved off their starting values."""
    name, changes = BACK[case]
    model = make(name, layers=len(mixers), **changes)
    for index, mixer in enumerate(mixers):
        right = {"right": LIMITED[mixer]} if limited and mixer in LIMITED else {}
        swap(model, index, mixer, {**SMALL[mixer], **right})
        torch.manual_seed(index)
        shake(mixer_at(model, index), 0.1)
    return model


def noise(count: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).normal(size=count)).astype(np.float32)


def cut(samples: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """In pieces of random sizes, some of them empty."""
    places = np.sort(rng.integers(0, len(samples) + 1, rng.integers(1, 12)))
    return np.split(samples, places)


def in_blocks(listener, pieces: list[np.ndarray], size: int) -> np.ndarray:
    blocks = Blocks(listener, size)
    return np.concatenate([logits for p in pieces for logits in blocks.push(p)] + list(blocks.finish()))


# --- the same, however it is heard


@pytest.mark.parametrize("case", BACK)
@settings(max_examples=10, deadline=None)
@given(
    mixers=st.lists(st.sampled_from(sorted(SMALL)), min_size=1, max_size=3),
    count=st.integers(400, 25000),
    size=st.integers(3, 40),
    limited=st.booleans(),
    seed=st.integers(0, 999),
)
def test_one_pass_is_blocks_is_a_batch(case, mixers, count, size, limited, seed):
    model = converted(case, mixers, limited)
    listener, samples = TorchListener(model), noise(count, seed)
    whole = listener.hear(samples)
    streamed = in_blocks(listener, cut(samples, np.random.default_rng(seed)), size)
    assert streamed.shape == whole.shape
    assert np.abs(streamed - whole).max() < 1e-4
    batch = torch.from_numpy(np.stack([samples, noise(count, seed + 1)]))
    with torch.inference_mode():
        out = model(torch.nn.functional.pad(batch, (0, 700)), torch.tensor([count, count]))
    assert int(out.lengths[0]) == len(whole)
    assert np.abs(out.logits[0, : len(whole)].numpy() - whole).max() < 1e-4


@pytest.mark.parametrize(("case", "name"), [*(("whisper", n) for n in SMALL), ("wave", "pyramid"), ("stack", "window")])
def test_every_bounded_mixer_in_many_blocks(case, name):
    listener, samples = TorchListener(converted(case, [name, name])), noise(64123)
    assert listener.field.overlap < 120
    found = in_blocks(listener, cut(samples, np.random.default_rng(1)), 4 * listener.field.grid)
    assert np.abs(found - listener.hear(samples)).max() < 1e-4


def test_less_context_than_the_field_is_not_enough():
    """The field is no larger than it must be, or nearly so: with a frame less either side the logits change."""
    model = converted("whisper", ["window", "pyramid"])
    listener, samples = TorchListener(model), noise(64000)
    whole, field = listener.hear(samples), listener.field
    first, last = field.needs(100, 104)
    near = listener.hear(samples[first * 320 : last * 320])[100 - first : 104 - first]
    assert np.abs(near - whole[100:104]).max() < 1e-5
    for start, stop in ((first + field.grid, last), (first, last - 6)):
        short = listener.hear(samples[start * 320 : stop * 320])[100 - start : 104 - start]
        assert np.abs(short - whole[100:104]).max() > 1e-5


@pytest.fixture(scope="module")
def talker():
    """A small model that says many words of the clip: its head is centred on it, and likes gaps."""
    model = converted("whisper", ["pyramid", "window"])
    with torch.no_grad():
        model.encoder.embed_positions.weight.zero_()
        model.net.head.weight.mul_(20)
        logits = model(torch.from_numpy(audio.read(CLIP)).unsqueeze(0)).logits[0]
        model.net.head.bias.sub_(logits.mean(0))
        model.net.head.bias[1] += (logits - logits.mean(0)).std()
    return model


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_says_what_one_pass_says(talker, seed):
    rng = np.random.default_rng(seed)
    samples = audio.read(CLIP)
    wanted = talker.transcribe(samples)
    found = list(talker.stream(cut(samples, rng), step=float(rng.uniform(0.05, 2))))
    assert len(found) > 3
    assert len(wanted.words) > 10
    assert " ".join(piece.text for piece in found) == wanted.text
    words = [word for piece in found for word in piece.words]
    assert [(w.word, w.start, w.end) for w in words] == [(w.word, w.start, w.end) for w in wanted.words]
    assert np.allclose([w.confidence for w in words], [w.confidence for w in wanted.words], atol=1e-4)
    assert [piece.seconds for piece in found] == sorted(piece.seconds for piece in found)


def test_words_come_as_soon_as_the_lookahead_is_there(talker):
    listener, samples = TorchListener(talker), audio.read(CLIP)
    given = 0

    def live():
        nonlocal given
        for at in range(0, len(samples), 800):
            given = min(at + 800, len(samples))
            yield samples[at : at + 800]

    seen = 0
    for piece in stream(listener, live(), step=0.32):
        if given < len(samples):  # else the end has come, and all the rest with it
            behind = given / 16000 - piece.seconds
            assert behind <= listener.field.ahead / 16000 + 0.05
            seen += 1
    assert seen > 3


def test_a_stream_takes_any_rate_and_16_bit(talker):
    samples = audio.to_int16(audio.read(CLIP))
    wanted = talker.transcribe(samples).text
    assert " ".join(p.text for p in talker.stream(np.array_split(samples, 7))) == wanted
    wide = audio.read(CLIP).repeat(3)
    found = list(talker.stream([wide[:50000], wide[50000:]], rate=48000))
    assert " ".join(p.text for p in found) == talker.transcribe(wide, rate=48000).text
    for wrong in (np.zeros((2, 9)), np.zeros(9, np.int32), np.array([np.inf]), [0.0]):
        with pytest.raises(LpaError, match="audio is"):
            list(talker.stream([wrong]))
    with pytest.raises(LpaError, match="no step"):
        talker.stream([samples], step=0)
    with pytest.raises(LpaError, match="too short"):
        list(TorchListener(converted("wave", ["none"])).stream([samples[:100]]))


def test_words_wait_for_the_gap_and_silence_is_forgotten(talker):
    words = Words(TorchListener(talker))
    ids = {s: i for i, s in enumerate(words.tokens.symbols)}

    def heard(text: str) -> np.ndarray:
        logits = np.zeros((len(text), len(ids)), np.float32)
        logits[range(len(text)), [ids.get(c, 0) for c in text]] = 9
        return logits

    assert words.push(heard("...ca")) == ()
    assert words.push(heard("at.")) == ()
    (cat,) = words.push(heard("|.|ddo.g"))
    assert (cat.word, cat.start, cat.end) == ("cat", 3 / 50, 7 / 50)
    assert [w.word for w in words.push(heard("|a|"))] == ["dog", "a"]
    for _ in range(3):
        assert words.push(heard("." * 1000)) == ()
    assert words.waiting == []
    assert words.push(heard("..i")) == ()
    (last,) = words.finish()
    assert (last.word, last.start) == ("i", (8 + 8 + 3 + 3000 + 2) / 50)


# --- how far a model hears


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_the_field_knows_what_every_mixer_reaches(name):
    """Computed from the plan alone; the mixer itself is asked here. A new mixer must be told to the field."""
    for right in (None, 2):
        given = {**SMALL.get(name, {}), **({"right": right} if right and name in LIMITED else {})}
        _, config = resolve(name, given)
        reach = build(name, make("whisper").encoder.layers[0].self_attn, config).reach
        layer = mixer_layer(Swap(0, name, config.to_dict()))
        if reach is None:
            assert layer is None
        else:
            assert (layer.left + layer.grid - 1, layer.right + layer.grid - 1) == reach


def test_weights_of_the_whole_recording_are_no_bounded_reach():
    config = {**resolve("ladder")[1].to_dict(), "weights": "utterance"}
    assert mixer_layer(Swap(0, "ladder", config)) is None
    assert (
        build("ladder", make("whisper").encoder.layers[0].self_attn, {"weights": "utterance", "heads": 4}).reach is None
    )


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: make("whisper-fixed-floor"), "2 attention layers"),
        (lambda: make("whisper-fixed-floor", layers=1), "attention in layer 0"),
        (lambda: make("whisper"), "positions from the start, mel floor from the loudest part"),
        (lambda: make("wav2vec2"), "input normalisation, group norm"),
    ],
)
def test_what_takes_whole_recordings_says_why(model, why):
    listener = TorchListener(model())
    assert why in listener.field.whole
    with pytest.raises(LpaError, match=f"cannot stream: it takes whole recordings .*{why}"):
        listener.stream([noise(1000)])
    with pytest.raises(LpaError, match=f"lookahead cannot be limited.*{why}"):
        listener.limit(1.0)


def test_recording_wide_mixers_are_named():
    model = make("whisper-fixed-floor")
    swap(model, 0, "lpa")
    swap(model, 1, "summary")
    assert TorchListener(model).field.whole == "lpa in layer 0, summary in layer 1"


def test_field_of_six_pyramids():
    """Whisper base with pyramids: worked out by hand, six times 256 frames and the block's own."""
    swaps = [Swap(i, "pyramid", resolve("pyramid")[1].to_dict()) for i in range(6)]
    base = {"encoder_layers": 6, "positions": False, "mel_floor": -7.0}
    field = Field.of("whisper", base, swaps)
    assert field.layers == (Layer(2, 1), *[Layer(256, 256, 16)] * 6)
    assert field.grid == 16
    assert field.needs(160, 176) == (160 - 6 * 256 - 16, 176 + 6 * 256 + 1)  # the start goes on to the grid
    assert field.ahead == (15 + 6 * 256 + 1) * 320


def test_blocks_of_a_file_are_long_beside_their_overlap():
    listener = TorchListener(converted("whisper", ["window", "conv"]))
    assert file_frames(listener) >= 4 * listener.field.overlap
    assert file_frames(listener) % listener.field.grid == 0


# --- looking less far ahead


def ahead_of(model) -> int:
    return TorchListener(model).field.ahead


@pytest.mark.parametrize("name", sorted(LIMITED))
def test_latency_limits_what_is_ahead(name):
    """No later sample has any influence, and the model is still one pass = blocks."""
    model = converted("whisper", [name] * 3)
    before = ahead_of(model)
    seconds = 0.3 if name == "pyramid" else 0.2
    limit_lookahead(model, seconds)
    listener = TorchListener(model)
    assert 0.1 * 16000 < listener.field.ahead <= seconds * 16000 < before
    samples, at = noise(32000), 50
    changed = samples.copy()
    changed[(at + 1) * 320 + listener.field.ahead :] += 1
    a, b = listener.hear(samples), listener.hear(changed)
    assert np.abs(a[: at + 1] - b[: at + 1]).max() < 1e-5
    assert np.abs(a[at + 1 :] - b[at + 1 :]).max() > 1e-3
    assert np.abs(in_blocks(listener, [samples], 8) - a).max() < 1e-4


@pytest.mark.parametrize("name", sorted(LIMITED))
@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_limited_mixer_is_its_definition_however_it_was_limited(name, right):
    source = make("whisper").encoder.layers[0].self_attn
    fixed = build(name, source, {**SMALL[name], "right": right})
    later = build(name, source, SMALL[name])
    torch.manual_seed(0)
    shake(later)
    fixed.load_state_dict(later.state_dict())
    x, mask = torch.randn(2, 37, 32), torch.arange(37) < torch.tensor([[37], [20]])
    free = later(x, mask).y
    later.look_ahead(right)
    assert fixed.reach == later.reach
    torch.testing.assert_close(fixed(x, mask).y, later(x, mask).y)
    torch.testing.assert_close(fixed(x, mask).y, fixed.definition(x, mask).y, atol=1e-5, rtol=1e-4)
    assert (fixed(x, mask).y - free).abs().max() > 1e-4
    with pytest.raises(LpaError, match="0 or more"):
        later.look_ahead(-1)


def test_latency_is_spread_over_the_layers_and_saved(tmp_path):
    swaps = [Swap(i, "pyramid", resolve("pyramid")[1].to_dict()) for i in range(6)]
    base = {"encoder_layers": 6, "positions": False, "mel_floor": -7.0}
    for seconds in (0.32, 1.0, 2.0, 5.0, 31.0, 40.0):
        cut = limit_ahead("whisper", base, swaps, seconds)
        rights = [256 if s.config["right"] is None else s.config["right"] for s in cut]
        assert Field.of("whisper", base, cut).ahead <= seconds * 16000
        assert seconds < 31.04 or rights == [256] * 6
        assert seconds > 0.32 or rights == [0] * 6
        assert seconds != 5.0 or min(rights) >= 32  # not all for one layer
    with pytest.raises(LpaError, match=r"0\.32 s at least; ask for --latency 0\.32"):
        limit_ahead("whisper", base, swaps, 0.1)
    model = converted("whisper", ["pyramid", "ladder"])
    limit_lookahead(model, 0.3)
    again = lpa.load(save(model, tmp_path / "m"))
    assert ahead_of(again) == ahead_of(model) <= 0.3 * 16000
    assert TorchListener(again).transcribe(noise(9999)) == TorchListener(model).transcribe(noise(9999))
    limit_lookahead(again, 0.2)
    assert ahead_of(again) <= 0.2 * 16000
    assert lpa.load(tmp_path / "m", latency=0.2).swaps == again.swaps


def test_latency_on_the_command_line(tmp_path, monkeypatch, capsys):
    save(converted("whisper", ["pyramid", "ladder"]), tmp_path / "bounded")
    save(make("whisper-fixed-floor"), tmp_path / "attention")
    limited = lpa.load(tmp_path / "bounded", backend="torch", latency=0.25)
    cases = {("bounded", "0.25"): limited.transcribe(CLIP).text, ("bounded", "0.01"): "", ("attention", "1"): ""}
    said = []
    for (folder, latency), text in cases.items():
        arguments = ["lpa", "transcribe", str(CLIP), "--model", str(tmp_path / folder), "--latency", latency]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert bool(end.value.code) != bool(text)
        out, err = capsys.readouterr()
        assert out.strip() == text
        said.append(err)
    assert said[1].startswith("lpa: this model looks ahead 0.")
    assert "attention layers" in said[2]
    assert said[1].count("\n") == said[2].count("\n") == 1


# --- from Python


def test_load_gives_something_that_listens(talker, tmp_path):
    wanted = transcribe(talker, CLIP)
    folder = save(talker, tmp_path / "m")
    model = lpa.load(folder)
    assert model.sites()  # to work on
    assert model.transcribe(CLIP) == model.transcribe(str(CLIP)) == wanted
    assert lpa.load(folder, backend="torch").transcribe(audio.read(CLIP)) == wanted
    assert wanted.words[0].start < wanted.words[-1].end <= wanted.seconds + 0.02
    assert all(0 < word.confidence <= 1 for word in wanted.words)


def test_default_is_the_model_inside_the_package(talker, tmp_path, monkeypatch):
    monkeypatch.setattr("lpa.run.DEFAULT", tmp_path / "default")
    with pytest.raises(LpaError, match=r"no built-in model .*--model FOLDER, or lpa\.load\('FOLDER'\)"):
        lpa.load("default")
    save(talker, tmp_path / "default")
    for model in (lpa.load(), lpa.load("default"), open_model("default")):
        assert model.transcribe(CLIP).text == transcribe(talker, CLIP).text


def test_an_export_keeps_its_latency_and_cannot_be_limited_further(tmp_path):
    pytest.importorskip("onnxscript", reason="pip install 'lpa[onnx]' to export")
    from lpa.export.onnx import export_onnx

    model = converted("whisper", ["pyramid"])  # the others' limits: see the forms below
    folder = save(model, tmp_path / "m")
    export_onnx(str(folder), tmp_path / "limited", latency=0.25)
    listener = lpa.load(tmp_path / "limited")
    assert (listener.backend, listener.field.whole) == ("onnx", "")
    assert listener.field.ahead <= 4000 < ahead_of(model)
    samples = noise(64000)
    wanted = lpa.load(folder, backend="torch", latency=0.25).hear(samples)
    assert np.abs(in_blocks(listener, [samples], 16) - wanted).max() < 1e-3
    listener.limit(0.25)
    with pytest.raises(LpaError, match=r"onnx model looks .* ahead and cannot be changed; export it again with"):
        listener.limit(0.1)
    with pytest.raises(LpaError, match="with --latency name another"):
        export_onnx(str(folder), folder, latency=0.5)


@pytest.mark.parametrize("name", sorted(LIMITED))
def test_a_graph_holds_the_limit(name):
    from lpa.export.forms import onnx_forms

    mixer = build(name, make("whisper").encoder.layers[0].self_attn, {**SMALL[name], "right": 1})
    x = torch.randn(1, 41, 32)
    wanted = shake(mixer)(x).y
    with onnx_forms():
        torch.testing.assert_close(mixer(x).y, wanted, atol=1e-5, rtol=1e-4)


# --- memory


MEMORY = """
import json, sys
from lpa.run import open_model
from lpa.transcribe import transcribe
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
listener = open_model(sys.argv[1])
listener.room = 20e6
found = []
for path in sys.argv[2:]:
    seconds = transcribe(listener, path).seconds
    found.append((seconds, peak()))
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_recording(talker, tmp_path):
    """Five minutes take no more than one: neither the audio nor anything made of it is ever all in memory."""
    save(talker, tmp_path / "m")
    paths = [tmp_path / f"{minutes}.flac" for minutes in (1, 5)]
    for minutes, path in zip((1, 5), paths, strict=True):
        quiet = np.zeros(minutes * 60 * 22050, np.int16)
        quiet[::997] = 3000
        soundfile.write(path, quiet, 22050)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "m"), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (short, before), (long, after) = json.loads(done.stdout)
    assert (round(short), round(long)) == (60, 300)
    assert after - before < 8 * 1024, f"{before} kB for 1 minute, {after} kB for 5"  # the audio alone is 19 MB
