"""Whole models, recognisers and the roofline: what is compared with what, on tiny models."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import WAVE, WHISPER, make
from typer.testing import CliRunner

from lpa import bench
from lpa.bench import clock, model, peers, roofline, whole
from lpa.bench.kernels import fuse_attention
from lpa.bench.parts import PARTS, Parts
from lpa.cli import app
from lpa.errors import LpaError
from lpa.surgery import mixer_at, save, swap

CLIP = Path(__file__).parents[1] / "data" / "librivox" / "austen-0880.flac"
TINY = {
    "wave": ("wav2vec2", {**WAVE, "num_hidden_layers": 2}),
    "mel": ("whisper", {**WHISPER, "encoder_layers": 2, "positions": False}),
}


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    monkeypatch.setattr(model, "SIZES", TINY)


# --- the clock


def test_processor_time_is_another_clock():
    seconds = bench.measure({"asleep": lambda: time.sleep(0.05)}, 1, now=time.process_time)
    assert seconds["asleep"][0] < 0.04


def test_memory_of_a_child_is_its_own():
    """A child of a process that holds much does not count that, and what it holds itself it does count."""
    held = np.ones(40_000_000)  # 320 MB
    code = "import numpy; {}; from lpa.bench.clock import peak_mb; print(peak_mb())"
    found = {}
    for name, line in (("small", "x = 0"), ("large", "x = numpy.ones(25_000_000)")):
        done = subprocess.run([sys.executable, "-c", code.format(line)], capture_output=True, text=True, check=True)
        found[name] = float(done.stdout)
    assert found["small"] < held.nbytes / 1e6 < clock.peak_mb()
    assert 150 < found["large"] - found["small"] < 250


def test_child_that_fails():
    with pytest.raises(LpaError, match=r"the process that measures memory failed .*KeyError"):
        clock.in_child("lpa.bench.model:peak_of", {})


# --- whole models


@pytest.mark.parametrize("size", TINY)
def test_rows_in_torch(size):
    rows = model.bench_model(size=size, mixers=["conv"], seconds=[1, 2], rounds=2, memory=False, attention_up_to=1)
    found = [(row.seconds, row.model) for row in rows]
    assert found == [(1, "attention"), (1, "conv"), (1, "window ±8"), (2, "conv"), (2, "window ±8")]
    assert rows[0].speedup == 1
    assert all(row.speedup is None for row in rows[3:])  # attention was left out there
    for row in rows:
        assert 0 < row.front_ms + row.mixers_ms + row.ffn_ms < 1.5 * row.high_ms
        assert min(row.front_ms, row.mixers_ms, row.ffn_ms) > 0


def test_parts_are_what_they_say():
    """Replace the mixers by nothing, and only their time goes."""
    watched = make("wav2vec2")
    for site in watched.sites():
        swap(watched, site, "none")
    slow = mixer_at(watched, 1)
    slow.mix = lambda x, *_: (time.sleep(0.05), type(slow).mix(slow, x))[1]
    parts = Parts(watched)
    with torch.inference_mode():
        parts.run(torch.randn(1, 4000))
    assert set(parts.seconds) == set(PARTS)
    assert parts.seconds["mixers"] >= 0.05 > parts.seconds["ffn"]
    parts.reset()
    assert set(parts.seconds.values()) == {0.0}


def test_window_of_equal_cost():
    """The window's price is the pyramid's, to one frame either side; mixers without keys get the narrowest."""
    _, pyramid, window = model.choose_variants(None, "wave", ["pyramid"])
    cost = [mixer_at(variant.build(), 0).mflop_per_frame() for variant in (pyramid, window)]
    one = 8 * 32 / 1e6
    assert abs(cost[0] - cost[1]) <= one
    assert model.choose_variants(None, "wave", ["conv"])[-1].name == f"window ±{model.NARROWEST}"


def test_a_folder_and_its_twin(tmp_path):
    made = make("wav2vec2", layers=3)
    swap(made, 0, "conv", {"taps": 5})
    swap(made, 2, "pyramid")
    save(made, tmp_path / "mine")
    attention, mine, window = model.choose_variants(str(tmp_path / "mine"), "", [])
    assert (attention.name, mine.name, attention.swaps) == ("attention", "mine", ())
    assert [(index, mixer) for index, mixer, _ in mine.swaps] == [(0, "conv"), (2, "pyramid")]
    assert [index for index, *_ in window.swaps] == [0, 2]
    assert mine.build().state_dict().keys() == made.state_dict().keys()


def test_onnx_beside_torch():
    """Each network in both, and a second table that tells them apart."""
    rows = model.bench_model(size="mel", mixers=["conv"], seconds=[1], backend="onnx", rounds=1, memory=False)
    assert {(row.backend, row.model) for row in rows} == {
        (where, name) for where in ("torch", "onnx") for name in ("attention", "conv", "window ±8")
    }
    assert [table.row_count for table in model.model_tables(rows)] == [6, 2]


def test_split_of_a_gain():
    """Twice from the algorithm in torch, three times from the framework with attention; what is left is the rest."""
    took = {("torch", "attention"): 120, ("torch", "mine"): 60, ("onnx", "attention"): 40, ("onnx", "mine"): 10}
    rows = [model.ModelRow(10, where, "fp32", name, ms, ms, ms, ms / 10, None) for (where, name), ms in took.items()]
    assert model.split_gain(rows) == [
        {
            **{"seconds": 10, "model": "mine", "algorithm_in_torch": 2, "algorithm_in_onnx": 4},
            **{"framework_with_attention": 3, "framework_converted": 6, "both": 12},
        }
    ]
    assert model.split_gain(rows[:3]) == []


@pytest.mark.parametrize("size", TINY)
def test_fused_attention_gives_the_same(size, tmp_path):
    from lpa.export.onnx import export_onnx
    from lpa.run.onnx import OnnxListener

    twin = model.Variant("attention", *TINY[size])
    export_onnx(str(save(twin.build(), tmp_path / "whole")), tmp_path / "onnx")
    samples = model.noise(1.3)
    before = OnnxListener(tmp_path / "onnx").run(samples)
    assert fuse_attention(tmp_path / "onnx" / "model.onnx", twin) == 2
    after = OnnxListener(tmp_path / "onnx").run(samples)
    assert np.abs(after - before).max() < 1e-5
    spec = {"seconds": 1.3, "backend": "onnx", "home": str(tmp_path / "onnx")}
    found = clock.in_child("lpa.bench.model:peak_of", spec)
    assert clock.peak_mb() > found["peak_mb"] >= found["loaded_mb"] > 10  # no torch in that one


def test_memory_of_one_pass_in_torch():
    """Attention over ten times the audio takes more, in a process that had the same model before it heard any."""
    variant = {"name": "attention", "family": "whisper", "base": TINY["mel"][1], "swaps": []}
    found = clock.in_child("lpa.bench.model:peak_of", {"variant": variant, "seconds": 60, "backend": "torch"})
    assert found["peak_mb"] > found["loaded_mb"] + 4  # 6,000 mel frames, and what becomes of them


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "huge"], "no size 'huge'; have mel, wave"),
        (["--size", "wave", "--mixer", "lap"], "no mixer 'lap'; have anchored"),
        (["--backend", "jax"], "no backend 'jax'; have onnx, torch"),
        (["--precision", "int4"], "no precision 'int4'; have fp32, int8"),
        (["--precision", "int8"], "add --backend onnx"),
        (["--seconds", "ten"], "is no list of numbers"),
        (["--seconds", "0"], "seconds must be positive"),
        (["nowhere"], "nowhere is no model folder"),
    ],
)
def test_mistakes(arguments, says):
    found = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert isinstance(found.exception, LpaError)
    assert says in str(found.exception)


def test_model_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LPA_COMMIT", "abc")  # for where the code is in no clone
    command = ["bench", "model", "--size", "wave", "--mixer", "conv", "--seconds", "1", "--rounds", "1", "--cpu-time"]
    found = CliRunner().invoke(app, [*command, "--no-memory", "--record", "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    lines = [json.loads(line) for line in (tmp_path / "results" / "bench.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == [row["model"] for row in rows] == ["attention", "conv", "window ±8"]
    assert {line["what"] for line in lines} == {"model, wave, torch, fp32, processor time"}
    assert all({"seconds", "median_ms", "speedup"} <= set(line["figures"]) for line in lines)


# --- other recognisers


def manifest(folder, count=2):
    import soundfile

    for i in range(count):
        soundfile.write(folder / f"{i}.wav", model.noise(1 + i), 16000)
    lines = [json.dumps({"audio": f"{i}.wav", "text": "hello there"}) for i in range(count)]
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "manifest.jsonl")


def test_our_own_model_among_the_peers(tmp_path, monkeypatch):
    save(make("whisper", positions=False), tmp_path / "tiny")
    monkeypatch.setattr(peers, "PEERS", {"other": peers.Peer("no_such_module", "pip install other", peers.open_own)})
    rows, absent = peers.bench_peers(manifest(tmp_path), 1, (), [str(tmp_path / "tiny")])
    assert absent == ["other: not installed; type: pip install other"]
    (row,) = rows
    assert (row.model, row.utterances) == ("lpa tiny", 1)
    assert row.wer > 0
    assert row.real_time_factor > 0
    assert row.cpu_factor > 0
    assert row.peak_mb > 100
    assert peers.peer_table(rows).row_count == 1


def test_pocketsphinx_where_it_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("pocketsphinx")
    monkeypatch.setattr(peers, "PEERS", {"pocketsphinx": peers.PEERS["pocketsphinx"]})
    (row,), absent = peers.bench_peers("tests/data/librivox/manifest.jsonl", 1)
    assert not absent
    assert row.wer < 80


def test_peers_that_cannot_run(monkeypatch):
    installed = peers.Peer("json", "nothing", peers.open_own, weights="a folder of weights")
    monkeypatch.setattr(peers, "PEERS", {"other": installed})
    ready, absent = peers.find_peers({})
    assert (ready, absent) == ([], ["other: no weights; give a folder of weights with --folder other=FOLDER"])
    assert peers.find_peers({"other": "here"}) == ([("other", "other", "here")], [])
    with pytest.raises(LpaError, match="names no folder"):
        peers.split_folder("other=nowhere")
    with pytest.raises(LpaError, match="no peer 'whispr'"):
        peers.split_folder("whispr=x")
    with pytest.raises(LpaError, match="none of the recognisers is installed"):
        peers.bench_peers("nowhere")


def test_a_peer_that_stops_says_why(tmp_path):
    worker = peers.Worker(peers.OWN, str(tmp_path))
    try:
        with pytest.raises(LpaError, match=r"lpa stopped \(.*neither plan.json nor config.json"):
            worker.ask(path="x.wav")
    finally:
        worker.close()


# --- the roofline


def test_roofline_takes_the_longer():
    machine = roofline.Machine(bandwidth=1e9, flops=1e12)
    assert machine.microseconds((1e9, 1e3)) == pytest.approx(1000)
    assert machine.microseconds((1e3, 1e6)) == pytest.approx(1000)


def test_roofline_command():
    found = CliRunner().invoke(app, ["bench", "roofline", "--frames", "50", "--dim", "48", "--rounds", "1", "--json"])
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    whole = {row["model"]: row for row in facts["rows"] if row["part"] == roofline.WHOLE}
    assert list(whole) == ["attention, scores stored", "attention", "lpa, 12 pulses", "lpa, 36 pulses"]
    for name, row in whole.items():
        parts = [r["us"] for r in facts["rows"] if r["model"] == name and r["part"] != roofline.WHOLE]
        assert row["us"] == pytest.approx(sum(parts), abs=0.5)
        assert (row["measured_us"] is None) == (name == "attention, scores stored")
    assert facts["gb_per_second"] > 0.05
    assert facts["gflop_per_second"] > 1


def test_work_is_the_layers_own():
    """Operations of the roofline's lpa layer are those the layer counts itself; memory is the paper's arithmetic."""
    source = bench.random_attention(768, 12)
    from lpa.mixers import build

    for pulses in roofline.PULSES:
        layer = build("lpa", source, dict.fromkeys(("aperiodic", "periodic", "positional"), pulses // 3))
        counted = sum(flop for flop, _ in roofline.lpa_work(6000, 768, pulses).values()) / 6000 / 1e6
        assert counted == pytest.approx(layer.mflop_per_frame(), rel=0.1)
    two_minutes = next(row for row in roofline.memory_rows() if row["seconds"] == 120)
    assert two_minutes["scores_mb"] == 2 * 864  # the paper's 864 MB are of 16-bit scores
    assert two_minutes["gates_36_mb"] == 4 * 0.864  # its 864 KB are of one head's gates


# --- the whole command


def test_transcribe_from_start_to_text():
    row, longer = whole.bench_transcribe(str(CLIP), "default", ["onnx"], [2.0, 9.0], 1)
    assert (row.backend, row.seconds, longer.seconds) == ("onnx", 2.0, 9.0)  # longer than the clip: it begins again
    assert 0.1 < row.wall_s < 60
    assert row.ms_per_second == pytest.approx(1e3 * row.wall_s / 2, rel=0.01)
    if sys.platform == "linux":
        assert 50 < row.peak_mb < 2000


def test_enhance_from_start_to_file():
    (row,) = whole.bench_enhance(str(CLIP), "default", [1.0], 1)
    assert row.seconds == 1.0
    assert row.ms_per_second == pytest.approx(1e3 * row.wall_s, abs=0.1)
    assert row.peak_mb is None or row.peak_mb > 100


def test_transcribe_that_fails_or_hears_nothing(tmp_path):
    with pytest.raises(LpaError, match=r"failed: .*nowhere"):
        whole.bench_transcribe(str(CLIP), str(tmp_path / "nowhere"), ["onnx"], [1.0], 1)
    silence = tmp_path / "silence.wav"
    soundfile.write(silence, np.zeros(16000), 16000)
    with pytest.raises(LpaError, match="heard no words"):
        whole.bench_transcribe(str(silence), "default", ["onnx"], [1.0], 1)
