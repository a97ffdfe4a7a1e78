"""The clock that every figure comes through, and the table of single layers."""

import json
import re
import time

import pytest
import torch
from typer.testing import CliRunner

from lpa.bench import LAYER_ROWS, bench_layer, layer_table, measure
from lpa.cli import app
from lpa.errors import LpaError
from lpa.inspect import attention_mflop

SMALL = ["--frames", "20", "--frames", "40", "--dim", "32", "--heads", "4", "--rounds", "2"]


def test_measure_interleaves():
    """Warm-up once each, then every round calls each once, and the device is waited for before and after."""
    calls = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = measure(runs, 3, lambda: calls.append("|"))
    assert "".join(calls) == "ab" + "|a||b|" * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_measure_times_the_run_and_the_wait():
    seconds = measure({"quick": lambda: None, "slow": lambda: time.sleep(0.02)}, 2)
    assert min(seconds["slow"]) >= 0.02 > min(seconds["quick"])
    waited = measure({"queued": lambda: None}, 1, lambda: time.sleep(0.02))
    assert waited["queued"][0] >= 0.02


def test_layer_json():
    found = CliRunner().invoke(app, ["bench", "layer", *SMALL, "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    names = ["attention", *LAYER_ROWS]
    assert [(row["frames"], row["mixer"]) for row in rows] == [(f, n) for f in (20, 40) for n in names]
    for row in rows:
        assert {"frames", "mixer", "median_ms", "speedup"} <= set(row)
        assert row["median_ms"] > 0
        assert row["speedup"] > 0
    assert [row["speedup"] for row in rows if row["mixer"] == "attention"] == [1, 1]


def test_layer_rows_that_were_asked_for():
    rows = bench_layer((10,), 32, 4, 1, ("ladder", "lpa"), plain=True)
    assert [row.mixer for row in rows] == ["attention", "ladder", "lpa", "lpa-plain"]
    assert rows[0].mflop_per_frame == round(attention_mflop(32, 10), 2)


def test_speedup_is_of_the_same_round(monkeypatch):
    """A slow spell of the machine hits both sides of a ratio: medians of times taken apart would say 20 here."""
    fake = {"attention": [2.0, 20.0, 20.0], "conv": [1.0, 10.0, 1.0]}
    monkeypatch.setattr("lpa.bench.layer.measure", lambda *_: fake)
    row = bench_layer((4,), 16, 2, 3, ("conv",))[1]
    assert (row.median_ms, row.speedup) == (1000, 2)


def test_layer_table():
    found = CliRunner().invoke(app, ["bench", "layer", *SMALL, "--mixer", "conv"])
    assert found.exit_code == 0, found.output
    assert len(re.findall(r"conv .*×", found.stdout)) == 2
    assert layer_table(bench_layer((4,), 16, 2, 1, ("conv",))).row_count == 2


def test_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LPA_COMMIT", "abc")  # for where the code is in no clone
    found = CliRunner().invoke(app, ["bench", "layer", *SMALL, "--mixer", "conv", "--record"])
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in (tmp_path / "results" / "bench.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["attention", "conv"] * 2
    assert all(line["figures"]["median_ms"] > 0 for line in lines)


def test_unknown_row():
    with pytest.raises(LpaError, match=r"no row 'fast'; have anchored, .*window"):
        bench_layer((4,), 16, 2, 1, ("fast",))


@pytest.mark.parametrize("frames", [(), (0,), (5, -1)])
def test_frames_must_be_positive(frames):
    with pytest.raises(LpaError, match="frames must be positive"):
        bench_layer(frames, 16, 2, 1)


def test_dtype():
    (_, row) = bench_layer((8,), 16, 2, 1, ("window",), dtype="bfloat16")
    assert row.frames == 8
    assert torch.get_default_dtype() == torch.float32
