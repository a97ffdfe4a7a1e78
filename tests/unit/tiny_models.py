"""Small random models of every family and norm layout, and a padded batch to try them on."""

import torch

from lpa.families import create
from lpa.families.sepformer import SepFormer

torch.set_num_threads(1)

CONV = {"conv_dim": [16] * 7, "num_conv_pos_embedding_groups": 4}
BODY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
WAVE = {**CONV, **BODY, "num_conv_pos_embeddings": 16}
STABLE = {**WAVE, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
WHISPER = {"d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "max_source_positions": 100}

CASES = {
    "wav2vec2": ("wav2vec2", WAVE),
    "wav2vec2-stable": ("wav2vec2", STABLE),
    "wav2vec2-stable-group": ("wav2vec2", {**STABLE, "feat_extract_norm": "group"}),
    "hubert": ("hubert", WAVE),
    "hubert-stable": ("hubert", STABLE),
    "hubert-batch-norm": ("hubert", {**WAVE, "conv_pos_batch_norm": True}),
    "wavlm": ("wavlm", WAVE),
    "wavlm-stable": ("wavlm", STABLE),
    "data2vec-audio": ("data2vec-audio", {**CONV, **BODY, "num_conv_pos_embeddings": 3}),
    "whisper": ("whisper", WHISPER),
    "whisper-fixed-floor": ("whisper", {**WHISPER, "mel_floor": -5.0, "positions": False}),
}
ONE_EACH = ["wav2vec2", "hubert-stable", "wavlm", "data2vec-audio", "whisper"]  # where the norm layout does not matter


def make(case: str, layers: int = 2, **changes):
    """The tiny model of a case, always with the same weights; weights are spread out so that no path is near zero."""
    family, config = CASES[case]
    name = "encoder_layers" if family == "whisper" else "num_hidden_layers"
    torch.manual_seed(0)
    model = create(family, {**config, name: layers, **changes})
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch():
    """(4, 12000) audio with noise in the padding, so that whatever reads it shows; the third row is all padding.

    Off centre, so that normalising matters; and of odd and even numbers of mel frames, where a stride of 2 matters.
    """
    generator = torch.Generator().manual_seed(1)
    return 0.1 + 0.3 * torch.randn(4, 12000, generator=generator), torch.tensor([12000, 7000, 0, 4500])


def make_sepformer(config: dict, **changes) -> SepFormer:
    """Always with the same weights, moved off their start, so that nothing is hidden by a zero or a one."""
    torch.manual_seed(0)
    model = SepFormer.create("sepformer", {**config, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model
