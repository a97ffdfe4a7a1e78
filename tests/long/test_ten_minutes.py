"""The built-in model on ten minutes of speech: one pass, blocks, batched and single, torch and ONNX Runtime, all one.

Minutes of work, so `make test` leaves it out; `make test-long` runs it.
"""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from lpa import align, audio, families
from lpa.run import open_model
from lpa.run.torch import TorchListener
from lpa.stream import Blocks, file_frames

CLIPS = sorted((Path(__file__).parents[1] / "data" / "librivox").glob("*.flac"))
SAMPLES = 600 * audio.RATE


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    """The five clips in turn, each time a little louder or softer, so that no two stretches are the same."""
    rng = np.random.default_rng(0)
    pieces, clips = [], cycle([audio.read(clip) for clip in CLIPS])
    while sum(map(len, pieces)) < SAMPLES:
        pieces.append(next(clips) * rng.uniform(0.5, 1.0))
    return np.concatenate(pieces)[:SAMPLES].astype(np.float32)


@pytest.fixture(scope="module")
def one_pass(speech) -> np.ndarray:
    return open_model("default", "onnx").hear(speech)


def blocks_of(listener, speech: np.ndarray) -> np.ndarray:
    blocks = Blocks(listener, file_frames(listener))
    pieces = (speech[i : i + 160_000] for i in range(0, len(speech), 160_000))
    return np.concatenate([logits for piece in pieces for logits in blocks.push(piece)] + list(blocks.finish()))


def test_blocks(speech, one_pass):
    listener = open_model("default", "onnx")
    np.testing.assert_allclose(blocks_of(listener, speech), one_pass, atol=1e-3)
    words = align.words(one_pass, listener.tokens, listener.frame_rate)
    assert listener.transcribe(speech).text == " ".join(word.word for word in words)


def test_torch_batched_and_single(speech, one_pass):
    model = families.load("default", dtype=torch.float32)
    short = len(speech) // 3
    batch = torch.zeros(2, len(speech))
    batch[0], batch[1, :short] = torch.from_numpy(speech), torch.from_numpy(speech[:short])
    with torch.inference_mode():
        together = model(batch, torch.tensor([len(speech), short]))
        alone = model(batch[1:, :short])
    np.testing.assert_allclose(together.logits[0].numpy(), one_pass, atol=1e-3)
    frames = int(together.lengths[1])
    np.testing.assert_allclose(together.logits[1, :frames].numpy(), alone.logits[0].numpy(), atol=1e-3)
    np.testing.assert_allclose(blocks_of(TorchListener(model), speech), one_pass, atol=1e-3)
