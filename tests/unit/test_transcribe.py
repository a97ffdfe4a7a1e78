"""From a file to words: sources, chunks, several files with a bad one among them, and a thousand damaged ones."""

import io
import json
import os
import random
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import make

from lpa import audio, transcribe
from lpa.errors import LpaError
from lpa.run import DEFAULT, open_model
from lpa.run.torch import TorchListener
from lpa.surgery import mixer_at, save, swap
from lpa.transcribe import forecast, hear, spans

CLIP = next((Path(__file__).parents[1] / "data" / "librivox").glob("*.flac"))
FFMPEG = """#!/bin/sh
echo "$@" > "{folder}/called"
case "$*" in *broken*) echo "Invalid data found" >&2; exit 1;; esac
cat "{folder}/pcm"
"""


def speech(seconds: float = 1.5) -> np.ndarray:
    return audio.read(CLIP)[: int(seconds * audio.RATE)]


@pytest.fixture(scope="module")
def tiny():
    """A model that says many words: its head is centred on the clip, or one symbol would always win."""
    model = make("whisper-fixed-floor")
    with torch.no_grad():
        model.net.head.weight.mul_(20)
        model.net.head.bias.sub_(model(torch.from_numpy(audio.read(CLIP)).unsqueeze(0)).logits[0].mean(0))
    return model


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    return save(tiny, tmp_path_factory.mktemp("models") / "tiny")


# --- sources


def test_words_are_the_greedy_text(tiny):
    found = transcribe.transcribe(tiny, CLIP)
    with torch.inference_mode():
        labels = tiny(torch.from_numpy(audio.read(CLIP)).unsqueeze(0)).logits[0].argmax(-1).tolist()
    assert found.text == tiny.tokens.decode(labels) == " ".join(w.word for w in found.words)
    assert len(found.words) > 3
    assert found.seconds == pytest.approx(audio.seconds(CLIP))
    assert all(0 <= w.start < w.end <= found.seconds + 0.02 and 0 < w.confidence <= 1 for w in found.words)


def test_file_bytes_array_folder_and_listener_agree(tiny, folder, tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, speech(), 16000)
    wanted = transcribe.transcribe(tiny, path)
    samples = audio.read(path)
    assert wanted.text
    assert transcribe.transcribe(folder, str(path), backend="torch") == wanted
    assert transcribe.transcribe(TorchListener(tiny), path.read_bytes()) == wanted
    assert transcribe.transcribe(tiny, samples) == wanted
    assert transcribe.transcribe(tiny, samples.astype(np.float64)) == wanted
    assert transcribe.transcribe(tiny, audio.to_int16(samples)) == wanted


def test_other_rates_and_channels(tiny, tmp_path):
    stereo = np.stack([speech(), speech()], 1).repeat(3, axis=0)
    soundfile.write(tmp_path / "a.flac", stereo, 48000)
    found = transcribe.transcribe(tiny, tmp_path / "a.flac")
    assert found.seconds == pytest.approx(1.5, abs=1e-3)
    assert transcribe.transcribe(tiny, stereo[:, 0], rate=48000).seconds == found.seconds


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 100), np.float32), np.zeros(0, np.float32), np.array([np.nan]), np.zeros(9, np.int32)]
)
def test_wrong_arrays_are_refused(tiny, wrong):
    with pytest.raises(LpaError, match="audio is"):
        transcribe.transcribe(tiny, wrong)


def test_what_a_model_cannot_hear_is_named(tiny, tmp_path):
    soundfile.write(tmp_path / "short.wav", speech()[:300], 16000)
    with pytest.raises(LpaError, match=r"short\.wav.*too short"):
        transcribe.transcribe(make("wav2vec2"), tmp_path / "short.wav")
    with pytest.raises(LpaError, match=r"hears 2 s at once.*--chunk 2"):
        transcribe.transcribe(make("whisper"), CLIP)
    with pytest.raises(LpaError, match="no CTC head"):
        transcribe.transcribe(make("whisper", head=False), CLIP)
    with pytest.raises(LpaError, match="no backend 'tpu'; have mlx, onnx, torch"):
        transcribe.transcribe("somewhere", CLIP, backend="tpu")
    with pytest.raises(LpaError, match="lpa export"):
        transcribe.transcribe(tmp_path, CLIP, backend="onnx")
    with pytest.raises(LpaError, match="runs in torch"):
        transcribe.transcribe(tiny, CLIP, backend="onnx")


# --- chunks


@pytest.mark.parametrize("case", ["whisper-fixed-floor", "wav2vec2"])
@pytest.mark.parametrize("count", [400, 31999, 32000, 32001, 32321, 64000, 100003, 113600])
def test_chunks_give_every_frame_once(case, count):
    listener = TorchListener(make(case))
    samples = np.random.default_rng(0).normal(size=count).astype(np.float32)
    whole = listener.hear(samples)
    assert hear(listener, samples, 2.0).shape == whole.shape
    pieces = list(spans(count, listener, 2.0))
    assert (len(pieces) > 1) == (count > 32000)
    assert all(stop - start <= 32000 and start % listener.stride == 0 for start, stop, _, _ in pieces)


def test_chunks_change_nothing_for_bounded_reach():
    """Where no frame sees further than the overlap, chunks are one pass: each frame sits where it should."""
    model = make("whisper-fixed-floor")
    for site in model.sites():
        swap(model, site, "window", {"side": 4, "block": 8})
    listener, samples = TorchListener(model), audio.read(CLIP)
    assert len(samples) > 6 * 16000
    assert np.abs(hear(listener, samples, 2.0) - listener.hear(samples)).max() < 1e-4


def test_chunk_must_hold_a_word(tiny):
    for chunk in (0.5, -1.0, float("nan")):
        with pytest.raises(LpaError, match="too short"):
            transcribe.transcribe(tiny, CLIP, chunk=chunk)


def test_progress_ends_at_the_end(tiny):
    done = []
    found = transcribe.transcribe(tiny, CLIP, chunk=2.0, progress=done.append)
    assert len(done) > 3
    assert done == sorted(done)
    assert done[-1] == pytest.approx(found.seconds)


def test_forecast_before_a_long_pass():
    hour = 3600 * 16000
    wavlm = make("wavlm")
    listener = TorchListener(wavlm)
    line = forecast(listener, hour, None)
    assert line.startswith("3600 s in one pass (2 attention layers, input normalisation, group norm): about ")
    frame_bytes = 4 * 3 * 16 * 64  # sixteen channels after a convolution of stride 5, three times over
    assert f"about {(8 * 4 * 180000**2 + frame_bytes * 180000) / 1e9:.1f} GB" in line
    assert line.endswith(f"with --chunk 30 {(8 * 4 * 1500**2 + frame_bytes * 1500) / 1e9:.2f} GB")
    assert forecast(listener, hour, 30.0) == forecast(listener, 16000, None) == ""
    for site in wavlm.sites():
        swap(wavlm, site, "pyramid")
    assert "GB" in forecast(TorchListener(wavlm), hour, None)  # no square any more, but its norms need all of it
    assert "attention" not in forecast(TorchListener(wavlm), hour, None)


def test_the_forecast_is_said_before_the_work(run, folder, clips, monkeypatch):
    monkeypatch.setattr(transcribe, "WORTH_A_LINE", 1)
    code, out, err = run("transcribe", clips[0], "--model", folder)
    assert (code, bool(out)) == (0, True)
    assert err.startswith(f"lpa: {clips[0]}: 2 s in one pass (2 attention layers): about 0.00 GB of memory")


# --- what libsndfile cannot read


@pytest.fixture
def ffmpeg(tmp_path, monkeypatch) -> Path:
    """A stand-in on the PATH that notes how it was called and gives a second of sound."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ffmpeg").write_text(FFMPEG.format(folder=folder))
    (folder / "ffmpeg").chmod(0o755)
    (folder / "pcm").write_bytes(speech(1.0).astype("<f4").tobytes())
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    return folder


def test_other_formats_go_through_ffmpeg(tiny, tmp_path, ffmpeg):
    path = tmp_path / "-talk.m4a"
    path.write_bytes(b"\0\0\0\x18ftypM4A " * 20)
    found = transcribe.transcribe(tiny, path)
    assert found.words == transcribe.transcribe(tiny, speech(1.0)).words
    called = (ffmpeg / "called").read_text()
    assert f"-i file:{path} " in called  # neither an option nor an address, whatever it is called
    assert "-protocol_whitelist file,pipe" in called
    assert transcribe.transcribe(tiny, path.read_bytes()).seconds == 1.0
    path.rename(tmp_path / "broken.m4a")
    with pytest.raises(LpaError, match=r"broken\.m4a cannot be read.*Invalid data found"):
        transcribe.transcribe(tiny, tmp_path / "broken.m4a")
    with pytest.raises(LpaError, match="not there"):
        transcribe.transcribe(tiny, tmp_path / "gone.m4a")


def test_without_ffmpeg_it_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, said in (("a.m4a", "a.m4a needs ffmpeg"), ("a.wav", "a.wav cannot be read as audio")):
        (tmp_path / name).write_bytes(b"no audio" * 30)
        with pytest.raises(LpaError, match=said):
            transcribe.transcribe(tiny, tmp_path / name)


# --- the command


@pytest.fixture
def clips(tmp_path) -> list[Path]:
    paths = [tmp_path / f"{name}.wav" for name in ("one", "bad", "two")]
    for path, seconds in ((paths[0], 1.5), (paths[2], 1.0)):
        soundfile.write(path, speech(seconds), 16000)
    paths[1].write_bytes(b"RIFF nothing")
    return paths


def test_one_bad_file_does_not_stop_the_rest(run, folder, tiny, clips):
    code, out, err = run("transcribe", *clips, "--model", folder)
    texts = [transcribe.transcribe(tiny, path).text for path in (clips[0], clips[2])]
    assert code == 1
    assert out.splitlines() == [f"{clips[0]}: {texts[0]}", f"{clips[2]}: {texts[1]}"]
    assert [line for line in err.splitlines() if "bad.wav" in line] == err.splitlines() != []


def test_result_alone_on_stdout(run, folder, tiny, clips):
    code, out, err = run("transcribe", clips[0], "--model", folder, "--backend", "torch")
    assert (code, out, err) == (0, transcribe.transcribe(tiny, clips[0]).text + "\n", "")
    code, out, err = run("transcribe", "-", "--model", folder, "--format", "json", stdin=clips[0].read_bytes())
    assert (code, err) == (0, "")
    assert json.loads(out)["file"] == "stdin"
    assert json.loads(out)["text"] == transcribe.transcribe(tiny, clips[0]).text
    assert len(json.loads(out)["words"]) > 0


def test_files_into_a_folder(run, folder, clips, tmp_path):
    for form in ("txt", "srt", "vtt", "json"):
        code, out, _ = run("transcribe", clips[0], clips[2], "--model", folder, "--format", form, "--out", "said")
        assert (code, out) == (0, "")
        assert all((tmp_path / "said" / f"{name}.{form}").stat().st_size for name in ("one", "two"))
    assert (tmp_path / "said" / "one.srt").read_text().startswith("1\n00:00:0")


def test_wrong_requests_are_one_line(run, folder, clips, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "there" / "one.txt").mkdir(parents=True)
    again = tmp_path / "again" / "one.wav"
    cases = {
        "no format 'doc'": (clips[0], "--model", folder, "--format", "doc"),
        "several files needs one file each": (*clips, "--model", folder, "--format", "srt"),
        "would both be written": (clips[0], again, "--model", folder, "--out", "x"),
        "only once": ("-", "-", "--model", folder),
        "--model FOLDER": (clips[0],),
        "cannot be made a folder": (clips[0], "--model", folder, "--out", "file"),
        "cannot be written": (clips[0], "--model", folder, "--out", "there"),
        "too short to hear": (clips[0], "--model", folder, "--chunk", "0"),
        "no model folder": (clips[0], "--model", "./none"),
    }
    if DEFAULT.exists():
        del cases["--model FOLDER"]
    for said, arguments in cases.items():
        code, out, err = run("transcribe", *arguments)
        assert (code, out) == (1, ""), said
        assert said in err
        assert err.startswith("lpa: ")
        assert err.count("\n") == 1


def test_a_bar_on_a_terminal_leaves_stdout_alone(folder, clips):
    """Under a pseudo-terminal as stderr: progress is drawn there, and the pipe gets the result alone."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lpa", "transcribe", str(clips[0]), str(clips[2]), "--model", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=False)
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, drawn
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [str(clips[0]), str(clips[2])]
    assert "two.wav" in drawn
    assert "\x1b" not in done.stdout


# --- damaged files


KINDS = [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
KINDS.append(("AIFF", "PCM_16"))


@lru_cache
def encoded(kind: str, subtype: str | None, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, speech(0.25), rate, format=kind, subtype=subtype)
    return file.getvalue()


def damaged(number: int) -> bytes:
    """A short file of one of several kinds with bytes changed, cut or added; the same for the same number."""
    dice = random.Random(number)
    kind, subtype = dice.choice(KINDS)
    data = bytearray(encoded(kind, subtype, dice.choice([8000, 16000, 48000])))
    for _ in range(dice.choice([0, 1, 4, 32])):
        place = dice.randrange(min(len(data), dice.choice([60, len(data)])))
        data[place] = dice.randrange(256)
    how = dice.randrange(4)
    if how == 1:
        del data[dice.randrange(len(data)) :]
    elif how == 2:
        at = dice.randrange(len(data))
        data[at:at] = dice.randbytes(dice.choice([1, 7, 500]))
    elif how == 3:
        at = dice.randrange(len(data))
        del data[at : at + dice.choice([1, 30, 400])]
    return bytes(data)


@pytest.mark.parametrize("reach", ["whole recordings", "blocks"])
def test_a_thousand_damaged_files_give_words_or_one_clear_line(tiny, reach, monkeypatch):
    """Five hundred each for both ways to hear a file; nothing but LpaError may come out."""
    model = tiny
    if reach == "blocks":
        model = make("whisper-fixed-floor")
        for site in model.sites():
            swap(model, site, "window", {"side": 4, "block": 8})
    listener = TorchListener(model)
    assert bool(listener.field.whole) == (reach == "whole recordings")
    refused, longest = [], 0.0
    for number in range(500):
        start = time.perf_counter()
        try:
            transcribe.transcribe(listener, damaged(number + 500 * (reach == "blocks")))
        except LpaError as error:
            refused.append(str(error))
        longest = max(longest, time.perf_counter() - start)
    assert all("audio bytes" in line and "\n" not in line for line in refused)
    assert 50 < len(refused) < 450  # some are heard and some are not, or the test says little
    assert longest < 10


def test_no_network_at_run_time(folder, tiny, tmp_path, clips):
    """In a process where a socket is an error, from the command line; and it is seen that it would be."""
    block = "import runpy, sys\ndef no(event, _):\n if event.startswith('socket.'): raise RuntimeError('network')\n"
    block += "sys.addaudithook(no)\n"
    run = "sys.argv = ['lpa', 'transcribe', *sys.argv[1:]]\nrunpy.run_module('lpa', run_name='__main__')\n"
    command = [sys.executable, "-c", block + run, str(clips[0]), "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, transcribe.transcribe(tiny, clips[0]).text + "\n"), done.stderr
    probe = [sys.executable, "-c", block + "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')"]
    assert "RuntimeError: network" in subprocess.run(probe, capture_output=True, text=True, check=False).stderr


def test_device_and_compiler_are_torchs(run, clips):
    code, _, said = run("transcribe", str(clips[0]), "--compile")
    assert (code, said) == (1, "lpa: onnx has no --device and no --compile; add --backend torch\n")
    code, _, said = run("transcribe", str(clips[0]), "--backend", "torch", "--device", "nowhere")
    assert code == 1
    assert said.startswith("lpa: --device nowhere: ")
    assert said.count("\n") == 1


def test_compiled_mixers_say_the_same(tmp_path):
    """The compiler's own passes without its C++: what runs is what it traced."""
    model = make("whisper-fixed-floor")
    for site in model.sites():
        swap(model, site, "pyramid")
    folder = save(model, tmp_path / "pyramid")
    plain, compiled = open_model(folder, "torch"), open_model(folder, "torch", compiled=True)
    mixers = [mixer_at(compiled.model, index) for index in compiled.model.swaps]
    assert mixers
    for mixer in mixers:
        mixer.compile(dynamic=True, backend="aot_eager")
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 16000).astype(np.float32)
    np.testing.assert_allclose(compiled.run(samples), plain.run(samples), atol=1e-4)
