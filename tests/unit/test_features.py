"""The convolutions in pieces against the layers one after the other, for every norm layout and at every cut."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make

from lpa.families import features

LAYOUTS = {
    "group": ("wav2vec2", {}),
    "group-bias": ("wav2vec2-stable-group", {"conv_bias": True}),
    "layer-bias": ("hubert-stable", {"conv_bias": True}),
    "wavlm": ("wavlm", {}),
    "data2vec": ("data2vec-audio", {}),
    "relu": ("wav2vec2", {"feat_extract_activation": "relu"}),
}


def by_layers(model, audio):
    x = audio.unsqueeze(1)
    for layer in model.trunk.feature_extractor.conv_layers:
        x = layer(x)
    return x.transpose(1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frames", [1, 2, 7, 8, 30])
def test_pieces_give_what_the_layers_give(layout, frames, monkeypatch):
    """Pieces of 7 frames: one piece, whole pieces, a rest of one frame; audio off centre, two recordings at once."""
    monkeypatch.setattr(features, "PIECE", 7)
    monkeypatch.setattr(features, "WINDOWS", 50)
    case, changes = LAYOUTS[layout]
    model = make(case, layers=1, **changes)
    layers = model.trunk.feature_extractor.conv_layers
    audio = 0.3 + torch.randn(2, (frames - 1) * model.stride + model.shortest + 5)
    with torch.inference_mode():
        assert features.fits(audio, layers)
        found, wanted = features.convolve(audio, layers, frames), by_layers(model, audio)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_gives_what_the_layers_give_and_their_gradients(layout, padded, monkeypatch):
    case, changes = LAYOUTS[layout]
    model = make(case, layers=1, **changes)
    parameters = [p for p in model.trunk.feature_extractor.parameters() if p.requires_grad]
    audio = 0.3 + torch.randn(3, 4321)
    lengths = torch.tensor([4321, 2222, model.shortest + 7]) if padded else None
    found = []
    for quick in (True, False):
        monkeypatch.setattr("lpa.families.wav2vec2.known", lambda _, quick=quick: quick)
        y, _ = model.front(audio, lengths)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        found.append((y, torch.autograd.grad((y * weights).sum(), parameters, materialize_grads=True)))
    assert not torch.equal(found[0][0], found[1][0])  # two ways, not one
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max() + 1e-5  # a bias that a norm undoes has none


def test_a_model_takes_pieces_at_work_and_batches_in_training(monkeypatch):
    model = make("wav2vec2", layers=1)
    layers = model.trunk.feature_extractor.conv_layers
    audio = torch.randn(1, 5000)
    assert not features.fits(audio, layers)  # a graph is wanted, and pieces have none
    assert features.known(layers)
    model.trunk.feature_extractor.conv_layers = refusing(layers)
    batch = model.front(audio)[0]
    with torch.no_grad():
        assert features.fits(audio, layers)
        pieces = model.front(audio)[0]
        with torch.autocast("cpu", torch.bfloat16):  # a held-out utterance, heard between two steps of training
            half = model.front(audio)[0]
    assert pieces.shape == batch.shape == (1, model.frames(5000), 16)
    torch.testing.assert_close(half.float(), pieces, atol=0.05, rtol=0.05)
    monkeypatch.setattr("lpa.families.wav2vec2.known", lambda _: False)
    with pytest.raises(AssertionError, match="layer by layer"):
        model.front(audio)


def refusing(layers):
    """The same layers, which refuse to be run themselves."""

    class Refusing(type(layers[0])):
        def forward(self, x):
            raise AssertionError("layer by layer")

    layers[0].__class__ = Refusing
    return layers


def test_strides_it_has_no_views_for():
    """A kernel beyond two strides, or short of one, is left to the layers."""
    with torch.no_grad():
        for kernel, stride in ((5, 2), (1, 2)):
            model = make("wav2vec2", layers=1, conv_dim=[8, 8], conv_kernel=[10, kernel], conv_stride=[5, stride])
            assert not features.fits(torch.randn(1, 400), model.trunk.feature_extractor.conv_layers)
            assert model.front(torch.randn(1, 400))[0].shape[2] == 8


def test_gelu_in_place_is_gelu():
    x = torch.randn(100)
    assert torch.equal(torch.ops.aten.gelu_(x.clone()), F.gelu(x))


def test_a_filter_that_lets_little_through_is_normed_as_well_in_a_batch():
    """Slow waves through filters of differences: in float32 their variance would be lost in the samples' power."""
    model = make("wav2vec2", layers=1)
    layers = model.trunk.feature_extractor.conv_layers
    with torch.no_grad():
        weight = layers[0].conv.weight  # (O, 1, kernel)
        weight.copy_(torch.randn(weight.shape).cumsum(-1).diff(n=2, dim=-1, prepend=torch.zeros(len(weight), 1, 2)))
        weight -= weight.mean(-1, keepdim=True)
        audio = torch.sin(torch.arange(16000) / 400).repeat(2, 1)
        one = features.convolve(audio[:1], layers, model.frames(16000))
        both = features.convolve_batch(audio, torch.tensor([16000, 9000]), layers)
    assert (both[:1] - one).abs().max() <= 1e-4 * one.abs().max()
