"""On real speech and real weights: the pyramid stands in for attention before any training."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lpa.mixers import Attention, Mixer, build

FIXTURE = Path(__file__).parents[1] / "data" / "whisper-base-en-layer5.safetensors"
DIM, HEADS = 512, 8


@pytest.fixture(scope="module")
def speech() -> tuple[nn.Module, dict[str, Tensor]]:
    """The last encoder layer's attention of Whisper base.en, and what it is given, (T, D) a recording."""
    attention = nn.Module()
    attention.num_heads = HEADS
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        attention.add_module(name, nn.Linear(DIM, DIM, bias=name != "k_proj"))
    with safe_open(FIXTURE, framework="pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    inputs = {name.removeprefix("input."): tensors.pop(name) for name in list(tensors) if name.startswith("input.")}
    attention.load_state_dict(tensors)
    return attention, inputs


def textbook(attention: nn.Module, x: Tensor) -> Tensor:
    """softmax(q kᵀ / √E) v, head by head."""
    q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (HEADS, -1)).transpose(0, 1) for n in "qkv")
    weights = (q @ k.transpose(1, 2) / (DIM // HEADS) ** 0.5).softmax(-1)  # (H, T, T)
    return attention.out_proj((weights @ v).transpose(0, 1).flatten(1))


def unexplained(mixer: Mixer, attention: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Squared error over squared deviation from each recording's mean, over all recordings."""
    error = spread = 0.0
    with torch.inference_mode():
        for x in inputs.values():
            target = textbook(attention, x)
            error += float((mixer(x[None]).y[0] - target).square().sum())
            spread += float((target - target.mean(0)).square().sum())
    return error / spread


def test_the_fixture_is_small_and_of_some_seconds(speech):
    assert FIXTURE.stat().st_size <= 3_000_000
    assert sum(len(x) for x in speech[1].values()) >= 750  # 15 s


def test_our_attention_is_the_textbook_one(speech):
    attention, inputs = speech
    ours = Attention.from_attention(attention)
    with torch.inference_mode():
        for x in inputs.values():
            torch.testing.assert_close(ours(x[None]).y[0], textbook(attention, x), atol=1e-4, rtol=1e-4)


def test_pyramid_explains_attention_without_training(speech):
    """33 windows leave at most 8 %, and less than half of what as many neighbouring keys leave."""
    attention, inputs = speech
    pyramid = build("pyramid", attention)
    window = build("window", attention, {"side": 16})
    windows, keys = len(pyramid.widths), 2 * window.side + 1
    assert windows <= keys == 33
    by_pyramid, by_window = (unexplained(mixer, attention, inputs) for mixer in (pyramid, window))
    figures = f"unexplained: pyramid {by_pyramid:.2%} with {windows} windows, window {by_window:.2%} with {keys} keys"
    assert by_pyramid <= 0.08, figures
    assert by_pyramid < by_window / 2, figures


def test_every_recording_by_itself(speech):
    attention, inputs = speech
    pyramid = build("pyramid", attention)
    left = {name: unexplained(pyramid, attention, {name: x}) for name, x in inputs.items()}
    assert max(left.values()) <= 0.08, {name: f"{share:.2%}" for name, share in left.items()}
