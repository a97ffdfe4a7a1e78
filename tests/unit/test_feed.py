"""Batches on the device: what is in them, for each of several processes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
import torch

from lpa.augment import surroundings
from lpa.data import AudioBank, Source
from lpa.feed import Feed
from lpa.recipe import TrainConfig
from lpa.tokens import Tokens

CPU = torch.device("cpu")
TEXTS = ["one", "three four", "two"]


@pytest.fixture
def bank(tmp_path) -> AudioBank:
    rng = np.random.default_rng(0)
    lines = []
    for i, text in enumerate(TEXTS):
        soundfile.write(tmp_path / f"{i}.wav", rng.integers(-9000, 9000, 5000 + 3000 * i).astype(np.int16), 16000)
        lines.append(json.dumps({"audio": f"{i}.wav", "text": text}))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    return AudioBank([str(tmp_path / "m.jsonl")])


def frames(samples: int) -> int:
    return samples // 320


def test_a_batch_holds_its_utterances(bank):
    feed, config, around = Feed(bank, Tokens(), CPU), TrainConfig(family="whisper"), surroundings(0, CPU)
    batch = feed.batch(config, frames, around, 0, np.array([2, 0, 1]), 0, 1)
    assert batch.audio.shape == (3, 16000)  # 11,000 samples, rounded up to half a second's 8,000
    assert batch.lengths.tolist() == [11000, 5000, 8000]
    assert batch.frames.tolist() == [34, 15, 25]
    for row, index in enumerate((2, 0, 1)):
        clip = torch.from_numpy(bank.clip(index).copy()).float() / 32768
        assert torch.equal(batch.audio[row, : len(clip)], clip)
        assert batch.audio[row, len(clip) :].abs().sum() == 0
        ids = Tokens().encode(TEXTS[index])
        assert batch.target_lengths[row] == len(ids)
        assert batch.targets[row, : len(ids)].tolist() == ids
    audio, lengths = feed.clean(np.array([1, 0]))
    assert torch.equal(audio[0], batch.audio[2, :8000])
    assert lengths.tolist() == [8000, 5000]


def test_processes_share_a_batch_and_one_too_many_counts_nothing(bank):
    feed, around = Feed(bank, Tokens(), CPU), surroundings(0, CPU)
    config = TrainConfig(family="whisper", speed=(0.9, 1.1), noise=1.0, gain_db=(-3.0, 3.0))
    whole = feed.batch(config, frames, around, 4, np.array([0, 2]), 0, 1)
    shares = [feed.batch(config, frames, around, 4, np.array([0, 2]), rank, 3) for rank in range(3)]
    assert [share.weights.tolist() for share in shares] == [[1.0], [1.0], [0.0]]
    for rank in range(2):
        length = int(whole.lengths[rank])
        assert shares[rank].lengths.tolist() == [length]
        torch.testing.assert_close(shares[rank].audio[0, :length], whole.audio[rank, :length])


def test_padding_stops_at_the_longest_a_model_takes(bank):
    feed, around = Feed(bank, Tokens(), CPU), surroundings(0, CPU)
    config = TrainConfig(family="whisper", max_seconds=0.7)
    assert feed.batch(config, frames, around, 0, np.array([2]), 0, 1).audio.shape == (1, 11200)


def test_what_joins_the_bank_joins_the_feed(bank, tmp_path):
    grown = AudioBank([bank.sources[0], Source(str(tmp_path / "shards"), [], [], packed=True)])
    feed = Feed(grown, Tokens(), CPU)
    before = len(feed.audio)
    clip = np.arange(6000, dtype=np.int16)
    (tmp_path / "shards").mkdir()
    np.savez(tmp_path / "shards" / "a.npz", audio=clip, lengths=np.array([6000]), text=np.array(["ten"]))
    grown.extend()
    feed.refresh()
    assert len(feed.audio) == before + 6000
    batch = feed.batch(TrainConfig(family="whisper"), frames, surroundings(0, CPU), 0, np.array([3]), 0, 1)
    torch.testing.assert_close(batch.audio[0, :6000], torch.from_numpy(clip).float() / 32768)
    assert batch.targets[0].tolist() == Tokens().encode("ten")


def test_a_batch_heard_twice_differs_in_everything_but_its_frames(bank):
    feed, around = Feed(bank, Tokens(), CPU), surroundings(0, CPU)
    drawn = {"speed": (0.8, 1.2), "noise": 1.0, "time_masks": 20.0, "gain_db": (-6.0, 6.0)}
    config = TrainConfig(family="whisper", consistency_weight=0.5, **drawn)
    batch = feed.batch(config, frames, around, 3, np.array([2, 0, 1]), 0, 1)
    assert len(batch.audio) == len(batch.weights) == 6
    for part in (batch.lengths, batch.frames, batch.targets, batch.target_lengths):
        assert torch.equal(*part.chunk(2))
    assert len(set(batch.lengths.tolist())) == 3
    assert not torch.equal(*batch.audio.chunk(2))
    assert not np.array_equal(*np.split(batch.draws.time_masks, 2))
    mine = feed.batch(config, frames, around, 3, np.array([2, 0, 1]), 1, 2)  # the second of two processes
    size = mine.audio.shape[1]
    assert torch.equal(mine.audio, batch.audio[[1, 4], :size])
