"""Wav2Vec2, HuBERT, WavLM and Data2VecAudio: raw audio, convolutions, a transformer, and a CTC head or none."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.wavlm.modeling_wavlm import WavLMAttention

from ..errors import LpaError
from ..mixers import Mixer
from ..tokens import Tokens
from .base import (
    ATTENTION,
    Flow,
    MixerSite,
    Output,
    SpeechModel,
    attendable,
    broadcast_mask,
    check_audio,
    padding_mask,
    split_settings,
)
from .features import convolve, convolve_batch, fits, known

# family -> what transformers calls its classes
NAMES = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert", "wavlm": "WavLM", "data2vec-audio": "Data2VecAudio"}


@dataclass(frozen=True)
class Wav2Vec2Settings:
    """What we configure beside transformers' own configuration."""

    normalise: bool = True  # zero mean and unit variance for every recording
    head: bool = True  # a CTC head, or the bare encoder


class OwnGroupNorm(nn.GroupNorm):
    """Group norm over each sample's own frames. The plain one counts the padding in, so batch and single differ."""

    def __init__(self, norm: nn.GroupNorm, conv: nn.Conv1d, flow: Flow):
        super().__init__(norm.num_groups, norm.num_channels, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.kernel, self.stride, self.flow = conv.kernel_size[0], conv.stride[0], flow

    def forward(self, x: Tensor) -> Tensor:
        if self.flow.samples is None:
            return super().forward(x)
        mask = padding_mask(conv_frames(self.flow.samples, self.kernel, self.stride), x.shape[-1])
        if mask is None:
            return super().forward(x)
        own = mask.unsqueeze(1)  # (B, 1, T)
        count = own.sum(-1, keepdim=True).clamp(min=1)
        x32 = x.float()
        mean = x32.masked_fill(~own, 0).sum(-1, keepdim=True) / count  # (B, C, 1): a group is one channel
        variance = (x32 - mean).square().masked_fill(~own, 0).sum(-1, keepdim=True) / count
        y = (x32 - mean) * torch.rsqrt(variance + self.eps) * self.weight.unsqueeze(-1) + self.bias.unsqueeze(-1)
        return y.masked_fill(~own, 0).to(self.weight.dtype)


def conv_frames(samples, kernel: int, stride: int):
    """Output frames of one unpadded convolution, for a number or a tensor of lengths."""
    frames = (samples - kernel) // stride + 1
    return frames.clamp(min=0) if isinstance(frames, Tensor) else max(frames, 0)


class PositionBias(WavLMAttention):
    """The part of a WavLM attention that makes the position bias, without the rest."""

    def __init__(self, attention: Any):
        nn.Module.__init__(self)  # not the attention's: its projections are what was replaced
        self.num_buckets, self.max_distance = attention.num_buckets, attention.max_distance
        self.rel_attn_embed = copy.deepcopy(attention.rel_attn_embed)  # training it leaves the original as it was

    def make(self, rows: int, frames: int) -> Tensor:
        return self.compute_bias(frames, frames).repeat(rows, 1, 1)  # (B·H, T, T)


class WavLMSite(MixerSite):
    """WavLM's attention returns three values, and the first layer's makes the position bias for all the others."""

    def __init__(self, mixer: Mixer, index: int, flow: Flow, layers: nn.ModuleList):
        super().__init__(mixer, index, flow)
        attention = layers[index].attention
        self.position = PositionBias(attention) if hasattr(attention, "rel_attn_embed") else None
        self.later = list(layers[index + 1 :])  # a plain list: these layers' parameters are not this module's

    def forward(self, hidden_states: Tensor, position_bias: Tensor | None = None, **_):
        if position_bias is None and self.position is not None and self.bias_wanted():
            position_bias = self.position.make(*hidden_states.shape[:2])
        return self.mix(hidden_states), None, position_bias

    def bias_wanted(self) -> bool:
        """A T × T bias is only made where some later layer still has attention to use it."""
        return any(not isinstance(layer.attention, MixerSite) for layer in self.later)


class Wav2Vec2Model(SpeechModel):
    """All four families: they share their layout, and differ in details handled here."""

    Settings = Wav2Vec2Settings

    def __init__(self, family: str, net: Any, settings: Wav2Vec2Settings, tokens: Tokens):
        super().__init__(family, net, net.config, settings, tokens)
        config = net.config
        if getattr(config, "add_adapter", False):
            raise LpaError(f"{family} with add_adapter is not supported: its output frames are no longer the encoder's")
        config.layerdrop = 0.0  # a dropped layer would break what mixers pass on
        config.apply_spec_augment = False  # the training loop augments, between front and encode
        if hasattr(self.trunk, "masked_spec_embed"):
            self.trunk.masked_spec_embed.requires_grad_(False)  # used by nothing here
        if family != "wavlm":  # which has an attention of its own, with a bias SDPA is not handed
            config._attn_implementation = ATTENTION
        self.frame_rate = self.sample_rate / self.stride
        self.mend_padding()

    def mend_padding(self) -> None:
        """Keep padding out of the two places where Hugging Face lets it in, and listen to its own forward."""
        trunk, flow = self.trunk, self.flow
        first = trunk.feature_extractor.conv_layers[0]
        if isinstance(getattr(first, "layer_norm", None), nn.GroupNorm):
            first.layer_norm = OwnGroupNorm(first.layer_norm, first.conv, flow)
        for module in trunk.encoder.pos_conv_embed.modules():
            if isinstance(module, nn.Conv1d):
                module.register_forward_pre_hook(flow.blank_input)
        trunk.register_forward_pre_hook(flow.enter_trunk, with_kwargs=True)
        trunk.encoder.register_forward_pre_hook(flow.enter_encoder, with_kwargs=True)
        trunk.encoder.register_forward_hook(flow.leave_encoder)

    @property
    def trunk(self) -> Any:
        return self.net.base_model

    @property
    def encoder(self) -> Any:
        return self.trunk.encoder

    @property
    def width(self) -> tuple[int, int]:
        return self.config.hidden_size, self.config.num_attention_heads

    @property
    def stride(self) -> int:
        """Samples from one frame to the next."""
        return math.prod(self.config.conv_stride)

    @property
    def shortest(self) -> int:
        """Samples that make one frame."""
        samples = 1
        for kernel, stride in zip(reversed(self.config.conv_kernel), reversed(self.config.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples

    def frames(self, samples):
        """Output frames for that many samples: a number, or a tensor of lengths."""
        for kernel, stride in zip(self.config.conv_kernel, self.config.conv_stride, strict=True):
            samples = conv_frames(samples, kernel, stride)
        return samples

    def front(self, audio: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lengths = check_audio(audio, lengths, self.shortest)
        mask = padding_mask(lengths, audio.shape[1])
        audio = normalise(audio, mask) if self.settings.normalise else blank(audio, mask)
        self.flow.samples = None if mask is None else lengths
        layers = self.trunk.feature_extractor.conv_layers  # its forward would build a graph even where frozen
        if mask is None and fits(audio, layers):
            features = convolve(audio, layers, self.frames(audio.shape[1]))  # (B, T, C)
        elif known(layers):
            features = convolve_batch(audio, None if mask is None else lengths, layers)
        else:
            x = audio.to(self.dtype).unsqueeze(1)  # (B, 1, S)
            for layer in layers:
                x = layer(x)
            features = x.transpose(1, 2)
        self.flow.samples = None
        lengths = self.frames(lengths)
        mask = padding_mask(lengths, features.shape[1])
        return features if mask is None else features.masked_fill(~mask.unsqueeze(-1), 0), lengths

    def encode(self, features: Tensor, lengths: Tensor, hidden: bool = False) -> Output:
        encoder = self.encoder
        mask = padding_mask(lengths, features.shape[1])
        x = self.trunk.feature_projection(features)
        x = x[0] if isinstance(x, tuple) else x  # (B, T, D)
        self.flow.begin(mask)
        x = x + encoder.pos_conv_embed(x)
        stable = getattr(self.config, "do_stable_layer_norm", False)  # norm first in every layer, and once at the end
        x = encoder.dropout(x if stable else encoder.layer_norm(x))
        x, after = self.run_layers(x, mask, hidden)
        self.flow.end()
        x = encoder.layer_norm(x) if stable else x
        logits = self.net.lm_head(self.net.dropout(x)) if self.settings.head else None
        return Output(logits, lengths, x, after)

    def run_layers(self, x: Tensor, mask: Tensor | None, hidden: bool) -> tuple[Tensor, list[Tensor]]:
        after, bias = [], None
        wavlm = self.family == "wavlm"  # whose attention takes the (B, T) mask, and hands on a position bias
        if mask is not None:
            mask = attendable(mask) if wavlm else broadcast_mask(mask)
        for layer in self.encoder.layers:
            if wavlm:
                x, bias = layer(x, attention_mask=mask, position_bias=bias)
            else:
                x = layer(x, attention_mask=mask)
            if hidden:
                after.append(x)
        return x, after

    def adapter(self, mixer: Mixer, index: int) -> nn.Module:
        if self.family == "wavlm":
            return WavLMSite(mixer, index, self.flow, self.encoder.layers)
        return super().adapter(mixer, index)

    def preparation(self) -> dict[str, Any]:
        return {"kind": "waveform", "normalise": self.settings.normalise}

    @classmethod
    def create(cls, family: str, config: dict[str, Any], tokens: Tokens) -> Wav2Vec2Model:
        """Fresh weights, from one flat dict of transformers' and our own settings."""
        name = NAMES[family]
        config = {"mask_time_prob": 0.0, **config, "vocab_size": len(tokens)}
        hf, settings = split_settings(family, config, getattr(transformers, f"{name}Config"), cls.Settings)
        network = getattr(transformers, f"{name}ForCTC" if settings.head else f"{name}Model")
        try:
            return cls(family, network(hf), settings, tokens).eval()
        except ValueError as error:  # heads that do not divide the width, say
            raise LpaError(f"{family} configuration is not valid: {' '.join(str(error).split())}") from error

    @classmethod
    def load(cls, family: str, source: str, config, tokens: Tokens | None, preprocessor: dict) -> Wav2Vec2Model:
        """From a Hugging Face folder or hub id; ForCTC checkpoints bring a head."""
        name = NAMES[family]
        head = any(a.endswith("ForCTC") for a in config.architectures or ())
        if head and tokens is None:
            raise LpaError(f"{source} has a CTC head but no vocab.json to read its output with")
        network = getattr(transformers, f"{name}ForCTC" if head else f"{name}Model")
        net, report = network.from_pretrained(source, config=config, dtype=torch.float32, output_loading_info=True)
        missing = sorted(k for k in report["missing_keys"] if not k.endswith("masked_spec_embed"))
        if missing:
            raise LpaError(f"{source} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)")
        settings = cls.Settings(normalise=bool(preprocessor.get("do_normalize", True)), head=head)
        tokens = tokens or Tokens()
        return cls(family, net, settings, fit_tokens(tokens, net.lm_head.out_features) if head else tokens).eval()


def fit_tokens(tokens: Tokens, outputs: int) -> Tokens:
    """The alphabet, with markers for outputs it has no symbols for: heads are often a little wider."""
    if len(tokens) > outputs:
        raise LpaError(f"vocab.json has {len(tokens)} symbols, but the CTC head only {outputs} outputs")
    markers = tuple(f"<{i}>" for i in range(len(tokens), outputs))
    return Tokens(tokens.symbols + markers, tokens.blank, tokens.word_gap)


def blank(audio: Tensor, mask: Tensor | None) -> Tensor:
    return audio if mask is None else audio.masked_fill(~mask, 0)


def normalise(audio: Tensor, mask: Tensor | None) -> Tensor:
    """Zero mean and unit variance over each recording's own samples, zero in the padding."""
    audio = blank(audio.float(), mask)
    if mask is None:
        count = torch.tensor(audio.shape[1], device=audio.device)
    else:
        count = mask.sum(1, keepdim=True).clamp(min=1)
    centred = blank(audio - audio.sum(1, keepdim=True) / count, mask)
    return centred * torch.rsqrt(centred.square().sum(1, keepdim=True) / count + 1e-7)  # as Wav2Vec2FeatureExtractor
