"""Sources, the bank, batches and the cursor, on real files written here and on LibriSpeech where it is at hand."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from rich.console import Console

from lpa import audio, data, sources
from lpa.data import AudioBank, Batches, bucket, check, fits, open_source, open_sources, rejecter
from lpa.errors import LpaError
from lpa.tokens import Tokens

RNG = np.random.default_rng(0)


def noise(seconds: float) -> np.ndarray:
    return RNG.integers(-3000, 3000, round(16000 * seconds)).astype(np.int16)


def librispeech(root: Path, speakers: dict[str, list[float]], split: str = "dev-clean", suffix: str = "flac") -> Path:
    """The official layout: speaker -> lengths in seconds, one chapter each."""
    for speaker, lengths in speakers.items():
        chapter = root / split / speaker / "10"
        chapter.mkdir(parents=True)
        lines = []
        for number, seconds in enumerate(lengths):
            name = f"{speaker}-10-{number:04d}"
            soundfile.write(chapter / f"{name}.{suffix}", noise(seconds), 16000)
            lines.append(f"{name} SPEAKER {'ABCDEFGHIJ'[number]} SAYS IT'S SO\n")
        (chapter / f"{speaker}-10.trans.txt").write_text("".join(lines))
    return root / split


def shard(path: Path, lengths: list[float], word: str = "word") -> list[np.ndarray]:
    path.parent.mkdir(exist_ok=True)
    clips = [noise(s) for s in lengths]
    texts = np.array([f"{word} {'abcdefghij'[i % 10]}" for i in range(len(clips))])
    sources.write_npz(path, audio=np.concatenate(clips), lengths=np.array([len(c) for c in clips]), text=texts)
    return clips


def manifest(path: Path, *entries: dict | str) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


# --- sources


@pytest.mark.parametrize("suffix", ["flac", "wav", "ogg"])
def test_librispeech_at_any_level(tmp_path, suffix):
    folder = librispeech(tmp_path, {"84": [0.5, 0.6], "422": [0.7]}, suffix=suffix)
    librispeech(tmp_path, {"61": [0.4]}, "test-clean", suffix)
    assert [len(open_source(str(f)).utterances) for f in (tmp_path, folder, folder / "84", folder / "84/10")] == [
        4,
        3,
        2,
        2,
    ]
    first = open_source(str(folder / "84")).utterances[0]
    assert (first.id, first.speaker, first.split) == ("84-10-0000", "84", "dev-clean")
    assert first.text == "speaker a says it's so"


def test_speakers_are_held_out_and_misspelt_ones_are_an_error(tmp_path):
    folder = str(librispeech(tmp_path, {"84": [0.5, 0.6], "422": [0.7], "777": [0.7]}))
    kept = open_source(folder, exclude=["84", "777"])
    held = open_source(folder, include=["84", "777"])
    assert {u.speaker for u in kept.utterances} == {"422"}
    assert {u.speaker for u in held.utterances} == {"84", "777"}
    with pytest.raises(LpaError, match="no speaker 85"):
        open_source(folder, exclude=["85"])
    with pytest.raises(LpaError, match="no utterance that can be used"):
        open_source(folder, exclude=["84", "422", "777"])
    shard(tmp_path / "packed/0.npz", [0.5])
    real, made = open_sources([folder, str(tmp_path / "packed")], exclude=["84"])  # a speaker of either will do
    assert (len(real.utterances), len(made.utterances)) == (2, 1)
    real, made = open_sources([folder, str(tmp_path / "packed")], include=["84"])
    assert (len(real.utterances), len(made.utterances)) == (2, 0)


def test_everything_wrong_in_librispeech_is_listed(tmp_path):
    folder = librispeech(tmp_path, {"84": [0.5, 0.5, 0.5, 0.5, 0.5]})
    chapter = folder / "84/10"
    files = sorted(chapter.glob("*.flac"))
    files[1].write_bytes(b"junk" * 100)
    files[2].unlink()
    files[3].unlink()
    soundfile.write(files[3].with_suffix(".wav"), np.zeros(0, np.int16), 16000)
    soundfile.write(chapter / "84-10-0009.flac", noise(0.5), 16000)
    with (chapter / "84-10.trans.txt").open("a") as file:
        file.write("84-10-0009 ...\n")
    soundfile.write(chapter / "84-10-0010.flac", noise(0.5), 16000)
    bank = AudioBank([str(folder)])
    assert bank.ids == ["84-10-0000", "84-10-0004"]
    reasons = {Path(what).stem: why for what, why in bank.bad}
    assert {name[-4:]: True for name in reasons} == dict.fromkeys(["0001", "0002", "0003", "0009", "0010"], True)
    assert "cannot be read" in reasons["84-10-0001"]
    assert "no audio file" in reasons["84-10-0002"]
    assert "no samples" in reasons["84-10-0003"]
    assert "no words" in reasons["84-10-0009"]
    assert "no line for it" in reasons["84-10-0010"]


def test_manifest(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(0.5), 16000)
    (tmp_path / "deep").mkdir()
    soundfile.write(tmp_path / "deep/b.wav", noise(0.25), 8000)
    path = manifest(
        tmp_path / "m.jsonl",
        {"audio": "a.wav", "text": "Hello – THERE!", "speaker": 7, "seconds": 0.5},
        {"audio": "deep/b.wav", "text": "two", "id": "second"},
        {"audio": "gone.wav", "text": "three"},
        {"audio": "a.wav"},
        {"audio": "a.wav", "text": "?"},
        "{broken",
        "[1, 2]",
    )
    bank = AudioBank([str(path)])
    assert bank.ids == ["a.wav", "second"]
    assert bank.texts == ["hello there", "two"]
    assert bank.speakers == ["7", ""]
    assert bank.lengths.tolist() == [8000, 8000]  # 0.25 s' worth of samples at half the rate last 0.5 s
    assert [what for what, _ in bank.bad] == [*(f"{path}:{n}" for n in (4, 5, 6, 7)), "gone.wav"]


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(LpaError, match=r"empty\.jsonl is empty"):
        open_source(str(tmp_path / "empty.jsonl"))
    with pytest.raises(LpaError, match="holds no speech"):
        open_source(str(tmp_path))
    with pytest.raises(LpaError, match="not there"):
        open_source(str(tmp_path / "gone"))
    manifest(tmp_path / "bad.jsonl", {"audio": "gone.wav", "text": "a"})
    with pytest.raises(LpaError, match=r"no utterance can be used; first fault: gone\.wav"):
        AudioBank([str(tmp_path / "bad.jsonl")])


def test_hugging_face_dataset(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    wav = tmp_path / "a.wav"
    soundfile.write(wav, noise(0.5), 16000)
    rows = {
        "audio": [{"bytes": wav.read_bytes(), "path": None}, {"bytes": None, "path": str(wav)}],
        "text": ["One", "Two"],
        "speaker_id": [5, 6],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(str(tmp_path / "both"))
    bank = AudioBank([str(tmp_path / "one")], cache=tmp_path / "cache")
    assert (bank.texts, bank.speakers, bank.lengths.tolist()) == (["one", "two"], ["5", "6"], [8000, 8000])
    assert set(check(str(tmp_path / "both"))["splits"]) == {"train", "dev"}
    with pytest.raises(LpaError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nowhere'}")


def test_hugging_face_dataset_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(LpaError, match="pip install datasets"):
        open_source("hf:someone/speech")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(LpaError, match="pip install datasets"):
        open_source(str(tmp_path))


# --- the bank


def test_bank_holds_the_samples_in_order(tmp_path):
    folder = librispeech(tmp_path, {"84": [0.5, 0.3, 0.4], "422": [0.6]})
    clips = shard(tmp_path / "packed/00000.npz", [0.2, 0.3])
    seen = []
    bank = AudioBank([str(folder), str(tmp_path / "packed")], progress=lambda *p: seen.append(p), workers=3)
    assert bank.source.tolist() == [0, 0, 0, 0, 1, 1]
    assert seen[-1] == (6, 6)
    for index, name in enumerate(bank.ids[:4]):
        path = next(folder.rglob(f"{name}.flac"))
        assert np.array_equal(bank.clip(index), soundfile.read(path, dtype="int16")[0])
    assert np.array_equal(bank.clip(4), clips[0])
    assert np.array_equal(bank.clip(5), clips[1])
    assert bank.hours == pytest.approx(2.3 / 3600)
    batch, lengths = bank.gather([5, 0])
    assert batch.shape == (2, 9600)
    assert lengths.tolist() == [4800, 9600]
    assert np.array_equal(audio.to_int16(batch[0, :4800]), clips[1])
    assert not batch[0, 4800:].any()


def test_shards_join_while_a_bank_is_in_use(tmp_path):
    folder = tmp_path / "packed"
    first = AudioBank([open_source(str(folder), growing=True)])
    assert len(first) == 0  # not there yet
    with pytest.raises(LpaError, match="no speech to draw"):
        Batches(first, 10).next()
    with pytest.raises(LpaError, match="not there"):
        open_source(str(folder))
    shard(folder / "00001.npz", [0.5, 0.5])
    bank = AudioBank([open_source(str(folder), growing=True)])
    before = bank.samples.copy()
    assert first.extend() == 2
    clips = shard(folder / "00000.npz", [0.25, 0.5, 0.75])
    (folder / "00002.npz.part").write_bytes(b"half of it")
    assert bank.new_shards() == ["0/00000.npz"]
    assert bank.extend() == 3
    assert bank.extend() == 0
    assert np.array_equal(bank.samples[: len(before)], before)
    assert np.array_equal(bank.clip(4), clips[2])
    (folder / "00003.npz").write_bytes(b"damaged")
    assert bank.extend() == 0
    assert bank.bad[-1][0].endswith("00003.npz")
    assert bank.new_shards() == []


@pytest.mark.parametrize("fault", ["type", "length", "empty"])
def test_damaged_shards(tmp_path, fault):
    folder = tmp_path / "packed"
    shard(folder / "0.npz", [0.5])
    audio_, lengths = np.zeros(8000, np.int16), np.array([4000, 4000])
    if fault == "type":
        audio_ = audio_.astype(np.float32)
    lengths = {"length": np.array([4000, 3000]), "empty": np.array([8000, 0])}.get(fault, lengths)
    sources.write_npz(folder / "1.npz", audio=audio_, lengths=lengths, text=np.array(["a", "b"]))
    bank = AudioBank([str(folder)])
    assert len(bank) == (2 if fault == "empty" else 1)
    assert {what for what, _ in bank.bad} == ({"1/1"} if fault == "empty" else {"1/0", "1/1"})


def test_cache_is_used_kept_fresh_and_bounded(tmp_path, monkeypatch):
    folder = librispeech(tmp_path / "a", {"84": [0.5, 0.3, 0.4]})
    (folder / "84/10/84-10-0001.flac").write_bytes(b"junk")
    cache = tmp_path / "cache"
    first = AudioBank([str(folder)], cache=cache)
    monkeypatch.setattr(sources, "_decode_group", lambda group: pytest.fail("decoded again"))
    again = AudioBank([str(folder)], cache=cache)
    assert np.array_equal(first.samples, again.samples)
    assert (first.ids, first.bad) == (again.ids, again.bad)
    assert len(again.bad) == 1
    monkeypatch.undo()
    (entry,) = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:1000])
    assert np.array_equal(AudioBank([str(folder)], cache=cache).samples, first.samples)
    soundfile.write(folder / "84/10/84-10-0001.flac", noise(0.2), 16000)
    assert len(AudioBank([str(folder)], cache=cache)) == 3
    assert len(list(cache.iterdir())) == 2
    other = librispeech(tmp_path / "b", {"1": [0.5]})
    AudioBank([str(other)], cache=cache, cache_bytes=20000)
    assert len(list(cache.iterdir())) == 1
    AudioBank([str(other)], cache=tmp_path / "none", cache_bytes=100)
    assert not (tmp_path / "none").exists()
    nobody = sources.Source("nobody", [], [])  # all of it is held out, or none
    assert len(AudioBank([open_source(str(other)), nobody], cache=tmp_path / "some")) == len(AudioBank([str(other)]))


def test_transcripts_longer_than_their_frames_are_listed(tmp_path):
    assert fits([3, 4, 5], 3)
    assert not fits([3, 4, 5], 2)
    assert not fits([3, 3], 2)  # a blank must stand between the two
    assert fits([3, 3], 3)
    assert fits([], 0)
    soundfile.write(tmp_path / "a.wav", noise(0.1), 16000)
    soundfile.write(tmp_path / "b.wav", noise(3.0), 16000)
    path = manifest(
        tmp_path / "m.jsonl",
        {"audio": "a.wav", "text": "aaa"},  # five frames
        {"audio": "a.wav", "text": "aaab", "id": "long"},  # six
        {"audio": "b.wav", "text": "b", "id": "slow"},
    )
    bank = AudioBank([str(path)], reject=rejecter(Tokens(), lambda samples: samples // 320, longest=2.0))
    assert bank.ids == ["a.wav"]
    assert dict(bank.bad) == {
        "long": "its transcript of 4 characters is longer than its 5 CTC frames",
        "slow": "lasts 3.0 s, more than 2",
    }


# --- batches


class Lengths:
    """As much of a bank as batches need: two sources, one of them in shards."""

    def __init__(self, real: int, shards: list[str], size: int = 40):
        rng = np.random.default_rng(1)
        self.sources, self.part_names = [None, None], ["0", *(f"1/{s}.npz" for s in shards)]
        known = {name: np.random.default_rng(int(name)).integers(16000, 320000, size) for name in shards}
        self.lengths = np.concatenate([rng.integers(16000, 480000, real), *known.values()])
        self.part = np.repeat(np.arange(1 + len(shards)), [real, *[size] * len(shards)])
        self.source = (self.part > 0).astype(int)
        self.ids = [
            f"{self.part_names[p]}:{i}" for p in range(1 + len(shards)) for i in range(real if p == 0 else size)
        ]

    def parts(self):
        return dict(zip(self.part_names, np.bincount(self.part).tolist(), strict=True))


def names(bank, batches) -> list[list[str]]:
    return [[bank.ids[i] for i in batch] for batch in batches]


def epoch(batches) -> list[np.ndarray]:
    """The next epoch's global batches."""
    drawn = [batches.next()[1]]
    while batches.position < len(batches):
        drawn.append(batches.next()[1])
    return drawn


def test_batches_hold_everything_once_with_little_padding():
    lengths = np.random.default_rng(0).integers(16000, 560000, 3000)
    batches = bucket(lengths, 160 * 16000, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(3000))
    padded = [lengths[b].max() * len(b) for b in batches]
    assert max(padded) <= 160 * 16000
    assert lengths.sum() / sum(padded) > 0.93
    longest = [lengths[b].max() for b in batches]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.2  # lengths come in random order
    assert [b.tolist() for b in bucket(np.array([99]), 10, np.random.default_rng(0))] == [[0]]


def test_epochs_are_seeded_and_differ():
    bank = Lengths(200, [])
    first, same, other = (Batches(bank, 60, seed=s) for s in (0, 0, 1))
    assert names(bank, first.plan()) == names(bank, same.plan()) != names(bank, other.plan())
    drawn = epoch(first)
    assert first.epoch == 0
    again = epoch(first)
    assert first.epoch == 1
    assert sorted(np.concatenate(drawn)) == sorted(np.concatenate(again)) == list(range(200))
    assert {tuple(sorted(b)) for b in drawn} != {tuple(sorted(b)) for b in again}  # who meets whom changes too


def test_shares_hold_and_the_larger_source_takes_turns():
    bank = Lengths(100, [f"{i:02d}" for i in range(25)])  # 1000 synthetic utterances
    batches = Batches(bank, 60, shares=(2, 3))
    heard = np.zeros(len(bank.lengths), int)
    for _ in range(4):
        chosen = np.concatenate(epoch(batches))
        real = chosen[chosen < 100]
        assert np.array_equal(np.sort(real), np.arange(100))
        seconds = [bank.lengths[c].sum() for c in (real, chosen[chosen >= 100])]
        assert seconds[1] / seconds[0] == pytest.approx(1.5, rel=0.02)
        np.add.at(heard, chosen, 1)
    made = heard[100:]
    assert made.max() - made.min() <= 1  # nobody is heard twice before everybody was heard once
    timed = Batches(bank, 60, shares=(1, 1), epoch_seconds=600)
    chosen = np.concatenate(timed.plan())
    assert bank.lengths[chosen].sum() / 16000 == pytest.approx(600, rel=0.1)
    few = Batches(Lengths(100, ["00"]), 60, shares=(1, 4))  # fewer than its share: heard several times
    counts = np.bincount(np.concatenate(few.plan()))
    assert counts[:100].tolist() == [1] * 100
    assert counts[100:].min() >= 3
    with pytest.raises(LpaError, match="2 sources need as many shares"):
        Batches(bank, 60, shares=(1,))


def test_processes_split_the_same_global_batches():
    bank = Lengths(150, ["00", "01"])
    alone = Batches(bank, 100, seed=5, shares=(1, 1))
    ranks = [Batches(bank, 100, seed=5, shares=(1, 1), rank=r, world=3) for r in range(3)]
    for _ in range(2 * len(alone)):
        whole, _ = alone.next()
        shares = [r.next() for r in ranks]
        assert all(np.array_equal(w, whole) for _, w in shares)
        assert sorted(np.concatenate([mine for mine, _ in shares])) == sorted(whole)
        sizes = [len(mine) for mine, _ in shares]
        assert max(sizes) - min(sizes) <= 1


def test_a_run_resumes_at_its_place_though_shards_have_come():
    before, after = Lengths(150, ["03", "01"]), Lengths(150, ["00", "01", "02", "03"])
    whole = Batches(before, 60, seed=7, shares=(1, 1))
    expected = [names(before, [whole.next()[1]])[0] for _ in range(len(whole))]
    part = Batches(before, 60, seed=7, shares=(1, 1))
    for _ in range(5):
        part.next()
    state = json.loads(json.dumps(part.state_dict()))
    resumed = Batches(after, 60, seed=7, shares=(1, 1))
    resumed.load_state_dict(state)
    rest = [names(after, [resumed.next()[1]])[0] for _ in range(len(whole) - 5)]
    assert rest == expected[5:]
    assert resumed.epoch == 0
    resumed.next()
    assert resumed.epoch == 1
    assert set(resumed.state_dict()["parts"]) == {"0", *(f"1/{i:02d}.npz" for i in range(4))}


def test_what_cannot_resume():
    bank = Lengths(150, ["01"])
    state = Batches(bank, 60).state_dict()
    with pytest.raises(LpaError, match=r"part 1/01\.npz of the data had 40 utterances and now has 0"):
        Batches(Lengths(150, ["02"]), 60).load_state_dict(state)
    with pytest.raises(LpaError, match="part 0 of the data had 150 utterances and now has 149"):
        Batches(Lengths(149, ["01"]), 60).load_state_dict(state)
    with pytest.raises(LpaError, match="seed 0, not 1"):
        Batches(bank, 60, seed=1).load_state_dict(state)
    with pytest.raises(LpaError, match="was batch_seconds or shares changed"):
        Batches(bank, 6000).load_state_dict({**state, "position": 50})


# --- what a folder holds


def test_check(tmp_path):
    librispeech(tmp_path, {"84": [0.5, 0.6], "422": [0.7]})
    librispeech(tmp_path, {"61": [1.2]}, "test-clean")
    (tmp_path / "dev-clean/84/10/84-10-0001.flac").write_bytes(b"junk")
    report = check(str(tmp_path))
    assert json.loads(json.dumps(report)) == report
    assert (report["utterances"], report["speakers"], report["words"]) == (3, 3, 15)
    assert report["hours"] == pytest.approx(2.4 / 3600, abs=1e-4)
    assert (report["shortest_seconds"], report["longest_seconds"]) == (0.5, 1.2)
    assert {name: row["utterances"] for name, row in report["splits"].items()} == {"dev-clean": 2, "test-clean": 1}
    assert [b["what"] for b in report["bad"]] == ["84-10-0001"]
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    data.show(report, console)
    text = console.export_text()
    assert "test-clean" in text
    assert "1 bad" in text
    assert "84-10-0001.flac cannot be read" in text


def test_real_librispeech():
    root = Path(os.environ.get("LPA_DATA", Path(__file__).parents[3] / "shared/data/LibriSpeech"))
    if not (root / "dev-clean/84").is_dir():
        pytest.skip(f"LibriSpeech is not at {root}; set LPA_DATA")
    report = check(str(root / "dev-clean/84"))
    assert (report["utterances"], report["speakers"], report["bad"]) == (65, 1, [])
    assert report["hours"] == pytest.approx(481 / 3600, abs=0.001)
    everything = open_source(str(root / "dev-clean"))
    assert len(everything.utterances) == 2703
    assert everything.bad == []
