"""The command: what it prints, its exit codes, and that whatever a user can put right is one line and no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import make

import lpa
from lpa.surgery import save, swap

GGML_MAGIC = b"lmgg"  # as little-endian bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model folder with its second layer replaced."""
    tiny = make("whisper")
    swap(tiny, 1, "pyramid")
    return save(tiny, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """Three short noises with text."""
    folder = tmp_path_factory.mktemp("speech")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(3):
        soundfile.write(folder / f"{number}.wav", 0.1 * rng.normal(size=8000 + 3000 * number), 16000)
        rows.append(
            {"audio": f"{number}.wav", "id": f"noise-{number}", "text": "some words", "speaker": str(number % 2)}
        )
    path = folder / "noise.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def process(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_inspect(run, model):
    code, text, error = run("inspect", model)
    assert (code, error) == (0, "")
    assert "1 of 2 attention layers replaced" in text
    assert "pyramid" in text


def test_inspect_json(run, model):
    code, text, _ = run("inspect", model, "--json")
    facts = json.loads(text)
    assert code == 0
    assert [layer["mixer"] for layer in facts["layers"]] == ["attention", "pyramid"]
    assert facts["parameters"] == sum(p.numel() for p in lpa.load(model).net.parameters())


def test_evaluate_json(run, model, manifest, tmp_path):
    code, text, _ = run("evaluate", "--model", model, "--data", manifest, "--json", "--out", tmp_path / "out.jsonl")
    result = json.loads(text)
    assert code == 0
    assert {"wer", "wer_interval", "cer", "real_time_factor", "batch_check", "bad"} <= set(result)
    assert (result["utterances"], result["words"], result["bad"]) == (3, 6, [])
    assert result["batch_check"]["utterances"] == 3
    assert result["audio_seconds"] == pytest.approx((3 * 8000 + 9000) / 16000, abs=0.01)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["noise-0", "noise-1", "noise-2"]


def test_evaluate_a_part(run, model, manifest):
    code, text, _ = run("evaluate", "--model", model, "--data", manifest, "--speaker", "0", "--limit", "1")
    assert code == 0
    assert text.startswith("WER ")
    assert "1 utterances" in text


def test_evaluate_writes_a_record(run, model, manifest, tmp_path, monkeypatch):
    monkeypatch.setenv("LPA_COMMIT", "abc")  # for where the code is in no clone
    assert run("evaluate", "--model", model, "--data", manifest, "--record")[0] == 0
    (record,) = [json.loads(line) for line in (tmp_path / "results" / "evaluate.jsonl").read_text().splitlines()]
    assert record["data"] == str(manifest)
    assert record["figures"]["utterances"] == 3


def test_data_check(run, manifest):
    code, text, _ = run("data", "check", manifest, "--json")
    assert code == 0
    assert json.loads(text)["utterances"] == 3


def test_data_check_names_the_bad_file(run, manifest, tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"this is no sound")
    (tmp_path / "all.jsonl").write_text(
        json.dumps({"audio": str(manifest.parent / "0.wav"), "text": "good"})
        + "\n"
        + json.dumps({"audio": "bad.wav", "text": "bad"})
        + "\n"
    )
    code, text, _ = run("data", "check", tmp_path / "all.jsonl")
    assert code == 1
    assert "1 bad" in text
    assert "bad.wav" in text
    code, text, _ = run("data", "check", tmp_path / "all.jsonl", "--json")
    assert code == 1
    assert [entry["what"] for entry in json.loads(text)["bad"]] == ["bad.wav"]


def test_compact(run, model, tmp_path):
    code, text, _ = run("compact", model, tmp_path / "small", "--weights", "int8")
    assert code == 0
    assert text.strip() == str(tmp_path / "small")
    assert json.loads((tmp_path / "small" / "plan.json").read_text())["weights"] == "int8"
    size, whole = ((folder / "weights.safetensors").stat().st_size for folder in (tmp_path / "small", model))
    assert size < whole
    before, after = lpa.load(model), lpa.load(tmp_path / "small")
    samples = 0.1 * torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        a, b = before(samples).last, after(samples).last
    assert not torch.equal(a, b)
    assert (a - b).square().mean() < 1e-3 * a.var()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("inspect nowhere", "no model folder nowhere"),
        ("inspect {tmp}", "neither plan.json nor config.json"),
        ("compact {model} small --weights int3", "no weights 'int3'; have float32, float16, int8"),
        ("evaluate --model nowhere --data {data}", "no model folder nowhere"),
        ("evaluate --model {model} --data nowhere", "nowhere is not there"),
        ("evaluate --model {model} --data {data} --speaker nobody", "no speaker nobody"),
        ("train nowhere.toml", "no recipe nowhere.toml"),
        ("import-whisper nowhere.bin out", "nowhere.bin is not there"),
        ("import-whisper {tmp}/short.bin out", "short.bin is truncated: it ends within its header"),
        ("import-whisper {tmp}/other.bin out", "other.bin is not a ggml file"),
        ("data check nowhere", "nowhere is not there"),
        ("bench layer --mixer nothing", "no row 'nothing'; have anchored, "),
        ("bench layer --dim 10 --heads 3 --frames 5", "3 heads do not divide a width of 10"),
        ("bench layer --frames 0", "frames must be positive"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(run, model, manifest, tmp_path, arguments, said):
    (tmp_path / "short.bin").write_bytes(GGML_MAGIC + bytes(10))
    (tmp_path / "other.bin").write_bytes(b"RIFF" + bytes(100))
    before = sorted(tmp_path.iterdir())
    code, text, error = run(*(a.format(model=model, data=manifest, tmp=tmp_path) for a in arguments.split()))
    assert code == 1
    assert text == ""
    assert said in error
    assert error.startswith("lpa: ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before  # and nothing was left behind


def test_unknown_mixer_in_a_plan(run, model, tmp_path):
    """The registry's own error reaches the user, choices and all."""
    folder = tmp_path / "odd"
    save(lpa.load(model), folder)
    plan = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(plan.replace('"pyramid"', '"pyramids"'))
    code, _, error = run("inspect", folder)
    assert code == 1
    assert error.startswith("lpa: no mixer 'pyramids'; have anchored, ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", ["inspect --colour", "bench layer --frames many", "paint", "evaluate"])
def test_wrong_usage(run, arguments):
    code, text, error = run(*arguments.split())
    assert (code, text) == (2, "")
    assert error.startswith("Usage: ")
    assert "Error: " in error


def test_a_fault_of_ours_is_not_hidden(run, monkeypatch):
    def broken(*_):
        raise ModuleNotFoundError("No module named 'lpa.lost'", name="lpa.lost")

    monkeypatch.setattr("lpa.data.check", broken)
    with pytest.raises(ModuleNotFoundError, match=r"lpa\.lost"):
        run("data", "check", "x")


def test_exit_code_of_the_real_command():
    found = subprocess.run(
        [sys.executable, "-m", "lpa", "data", "check", "nowhere"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("lpa: nowhere is not there")
    assert found.stderr.count("\n") == 1


def without_torch(*arguments: str) -> subprocess.CompletedProcess:
    """The command where torch is not installed: None in sys.modules makes its import fail as a missing one does."""
    return process(
        f"import sys; sys.modules['torch'] = None; sys.argv = ['lpa', *{list(arguments)!r}]; "
        "from lpa.cli import main; main()"
    )


@pytest.mark.parametrize("arguments", [("inspect", "x"), ("bench", "layer"), ("compact", "x", "y")])
def test_missing_torch(arguments):
    found = without_torch(*arguments)
    assert found.returncode == 1
    assert found.stderr == "lpa: this needs torch; type: pip install 'lpa[torch]'\n"


def test_data_check_needs_no_torch(manifest):
    found = without_torch("data", "check", str(manifest))
    assert found.returncode == 0, found.stderr
    assert "nothing bad" in found.stdout
