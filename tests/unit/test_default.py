"""The built-in model: small, without attention, and the same however a recording reaches it."""

from pathlib import Path

import numpy as np
import torch

from lpa import audio, families
from lpa.plan import Plan
from lpa.run import DEFAULT, open_model
from lpa.stream import Blocks

CLIPS = sorted((Path(__file__).parents[1] / "data" / "librivox").glob("*.flac"))


def test_it_fits_and_has_no_attention_and_no_positions():
    assert sum(file.stat().st_size for file in DEFAULT.iterdir()) <= 25e6
    plan = Plan.read(DEFAULT)
    assert len(plan.swaps) == plan.base["encoder_layers"] == 6
    assert {swap.mixer for swap in plan.swaps} == {"pyramid"}
    assert plan.base["positions"] is False
    assert not open_model("default").field.whole


def test_where_in_a_recording_a_frame_is_changes_nothing_but_the_grid_of_its_windows():
    """Windows begin every 128 frames: what is moved by as much gives the same, by less nearly the same."""
    clips = [audio.read(str(clip)) for clip in CLIPS]
    samples = np.concatenate([*clips, *clips, *clips])  # 75 s, of which the last 8 do not hear the first 15
    listener = open_model("default")
    whole = listener.hear(samples)[-400:]
    moved = {frames: listener.hear(samples[frames * 320 :])[-400:] for frames in (5, 128, 640)}
    letters = {frames: (other.argmax(-1) != whole.argmax(-1)).mean() for frames, other in moved.items()}
    assert max(np.abs(moved[frames] - whole).max() for frames in (128, 640)) < 0.1
    assert letters[128] == letters[640] == 0
    assert 0 < letters[5] < 0.05


def test_one_pass_is_blocks_is_a_batch_is_a_stream():
    clips = [audio.read(str(clip)) for clip in CLIPS]
    samples = np.concatenate([*clips, *clips])  # 50 s
    listener = open_model("default")
    whole = listener.hear(samples)
    blocks = Blocks(listener, 640)
    pieces = [logits for chunk in np.array_split(samples, 37) for logits in blocks.push(chunk)]
    streamed = np.concatenate([*pieces, *blocks.finish()])
    assert len(pieces) >= 1
    assert streamed.shape == whole.shape
    assert np.abs(streamed - whole).max() < 1e-3
    model = families.load("default")
    batch = torch.zeros(2, len(samples) + 5000)
    batch[0, : len(samples)] = torch.from_numpy(samples)
    batch[1, : len(clips[0])] = torch.from_numpy(clips[0])
    with torch.inference_mode():
        output = model(batch, torch.tensor([len(samples), len(clips[0])]))
    for row, wanted in enumerate((whole, listener.hear(clips[0]))):
        own = output.logits[row, : output.lengths[row]].numpy()
        assert own.shape == wanted.shape
        assert np.abs(own - wanted).max() < 1e-3
    said = " ".join(piece.text for piece in listener.stream(np.array_split(samples, 20)) if piece.text)
    assert said == listener.transcribe(samples).text
