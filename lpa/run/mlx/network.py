"""The speech models in MLX, rebuilt from a plan and its weights: one recording's features in, CTC logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import mlx.core as mx

from ...errors import LpaError
from ...plan import Plan
from .layers import Conv, Flow, LayerNorm, Linear, Mixer, gelu
from .mixers import Attention, build
from .weights import Weights

SKIP = 4  # a mixer is handed the output of the mixer this many layers below it


class Layer:
    """One transformer layer: what mixes, a feed-forward network, and a norm before or after each."""

    def __init__(self, mixer: Mixer, swapped: bool, norms: list[LayerNorm], feed: list[Linear], norm_first: bool):
        self.mixer, self.swapped, self.norms, self.feed, self.norm_first = mixer, swapped, norms, feed, norm_first

    def __call__(self, index: int, x: mx.array, flow: Flow) -> mx.array:
        first, last = self.norms
        if self.norm_first:
            x = x + self.mix(index, first(x), flow)
            return x + self.expand(last(x))
        x = first(x + self.mix(index, x, flow))
        return last(x + self.expand(x))

    def mix(self, index: int, x: mx.array, flow: Flow) -> mx.array:
        flow.skip = flow.outputs.pop(index - SKIP, None)
        y = self.mixer(x, flow)
        if self.swapped:
            flow.outputs[index] = y
        return y

    def expand(self, x: mx.array) -> mx.array:
        up, down = self.feed
        return down(gelu(up(x)))


class Network(ABC):
    names: ClassVar[tuple[str, str, str, str]]  # what a layer calls its attention, the norm there, and both products

    def __init__(self, plan: Plan):
        self.base = plan.base
        self.swaps = {swap.index: swap for swap in plan.swaps}
        for field in ("activation_function", "hidden_act", "feat_extract_activation"):
            if self.base.get(field, "gelu") != "gelu":
                raise LpaError(f"MLX has no {field} {self.base[field]!r} here, only gelu; use --backend torch")

    @abstractmethod
    def __call__(self, features: mx.array) -> mx.array:
        """Features (T', C) or samples (S,), as the numpy front end prepares them → logits (T, V)."""

    def build_layers(
        self, weights: Weights, count: int, dim: int, heads: int, inner: int, eps: float, norm_first: bool
    ) -> list[Layer]:
        attention, norm, up, down = self.names
        layers = []
        for index in range(count):
            own, swap = weights.at(f"layers.{index}"), self.swaps.get(index)
            norms = [LayerNorm(own, name, dim, eps) for name in (norm, "final_layer_norm")]
            feed = [Linear(own, up, inner, dim), Linear(own, down, dim, inner)]
            if swap is None:
                mixer: Mixer = Attention(own.at(attention), dim, heads, {})
            else:
                mixer = build(swap.mixer, own.at(f"{attention}.mixer"), dim, heads, swap.config)
            layers.append(Layer(mixer, swap is not None, norms, feed, norm_first))
        return layers

    @staticmethod
    def run_layers(layers: list[Layer], x: mx.array) -> mx.array:
        flow = Flow()
        for index, layer in enumerate(layers):
            x = layer(index, x, flow)
            mx.eval(x)  # so that no more than one layer's tensors are held
        return x


class Whisper(Network):
    """Whisper's encoder with a CTC head."""

    names = ("self_attn", "self_attn_layer_norm", "fc1", "fc2")

    def __init__(self, plan: Plan, weights: Weights, symbols: int):
        super().__init__(plan)
        base, own = self.base, weights.at("encoder")
        dim, mels = base["d_model"], base["num_mel_bins"]
        self.convs = [
            Conv(own.matrix("conv1.weight", dim, mels, 3), own.exact("conv1.bias", dim), padding=1),
            Conv(own.matrix("conv2.weight", dim, dim, 3), own.exact("conv2.bias", dim), stride=2, padding=1),
        ]
        self.positions = own.exact("embed_positions.weight", base["max_source_positions"], dim)
        heads, inner = base["encoder_attention_heads"], base["encoder_ffn_dim"]
        self.layers = self.build_layers(own, base["encoder_layers"], dim, heads, inner, 1e-5, norm_first=True)
        self.norm = LayerNorm(own, "layer_norm", dim)
        self.head = Linear(weights, "head", symbols, dim)
        weights.check_all_taken()

    def __call__(self, features: mx.array) -> mx.array:
        x = features
        for conv in self.convs:
            x = gelu(conv(x))
        x = x + (self.positions[: len(x)] if self.base["positions"] else self.positions[0])
        return self.head(self.norm(self.run_layers(self.layers, x)))


class Wav2Vec2(Network):
    """Wav2Vec2 and HuBERT: convolutions over the waveform, a transformer, a CTC head."""

    names = ("attention", "layer_norm", "feed_forward.intermediate_dense", "feed_forward.output_dense")

    def __init__(self, plan: Plan, weights: Weights, symbols: int):
        super().__init__(plan)
        base, own = self.base, weights.at(plan.family)
        if base.get("adapter_attn_dim") is not None:
            raise LpaError("MLX has no wav2vec2 with attention adapters here; use --backend torch")
        dim, eps = base["hidden_size"], base["layer_norm_eps"]
        self.convs = [self.build_conv(own, index) for index in range(len(base["conv_dim"]))]
        project = own.at("feature_projection")
        channels, normed = base["conv_dim"][-1], base.get("feat_proj_layer_norm", True)
        self.project_norm = LayerNorm(project, "layer_norm", channels, eps) if normed else None
        self.project = Linear(project, "projection", dim, channels)
        self.positions = PositionConv(own.at("encoder.pos_conv_embed"), base)
        self.norm_first = base.get("do_stable_layer_norm", False)
        heads, inner = base["num_attention_heads"], base["intermediate_size"]
        encoder, count = own.at("encoder"), base["num_hidden_layers"]
        self.layers = self.build_layers(encoder, count, dim, heads, inner, eps, self.norm_first)
        self.norm = LayerNorm(encoder, "layer_norm", dim, eps)
        self.head = Linear(weights, "lm_head", symbols, dim)
        weights.check_all_taken("masked_spec_embed", "num_batches_tracked")  # of use in training alone

    def build_conv(self, own: Weights, index: int) -> tuple[Conv, Any]:
        """A convolution and the norm that follows it, if one does."""
        base, at = self.base, own.at(f"feature_extractor.conv_layers.{index}")
        width, before = base["conv_dim"][index], base["conv_dim"][index - 1] if index else 1
        kernel = at.matrix("conv.weight", width, before, base["conv_kernel"][index])
        conv = Conv(
            kernel, at.exact("conv.bias", width) if base["conv_bias"] else None, stride=base["conv_stride"][index]
        )
        if base["feat_extract_norm"] == "layer":
            return conv, LayerNorm(at, "layer_norm", width)
        return conv, None if index else ChannelNorm(at, width)

    def __call__(self, features: mx.array) -> mx.array:
        x = features[:, None]  # (S, 1)
        for conv, norm in self.convs:
            x = conv(x)
            x = gelu(x if norm is None else norm(x))
            mx.eval(x)
        x = self.project(x if self.project_norm is None else self.project_norm(x))
        x = x + self.positions(x)
        x = self.run_layers(self.layers, x if self.norm_first else self.norm(x))
        return self.head(self.norm(x) if self.norm_first else x)


class ChannelNorm:
    """Group norm with a group a channel: over time, each channel on its own."""

    def __init__(self, weights: Weights, dim: int):
        self.weight, self.bias = weights.exact("layer_norm.weight", dim), weights.exact("layer_norm.bias", dim)

    def __call__(self, x: mx.array) -> mx.array:
        centred = x - x.mean(0)
        return centred * mx.rsqrt(centred.square().mean(0) + 1e-5) * self.weight + self.bias


class PositionConv:
    """Positions from a wide grouped convolution, its kernel stored with its norm apart, or behind a batch norm."""

    def __init__(self, weights: Weights, base: dict[str, Any]):
        dim, taps, groups = base["hidden_size"], base["num_conv_pos_embeddings"], base["num_conv_pos_embedding_groups"]
        shape = (dim, dim // groups, taps)
        self.scale, self.shift = mx.ones(dim), mx.zeros(dim)
        if base.get("conv_pos_batch_norm", False):
            norm = weights.at("batch_norm")
            mean, variance = norm.exact("running_mean", dim), norm.exact("running_var", dim)
            self.scale = norm.exact("weight", dim) * mx.rsqrt(variance + 1e-5)
            self.shift = norm.exact("bias", dim) - mean * self.scale
            kernel = weights.matrix("conv.weight", *shape)
        else:
            size = weights.exact("conv.parametrizations.weight.original0", 1, 1, taps)
            stored = weights.matrix("conv.parametrizations.weight.original1", *shape)
            exact = stored.astype(mx.float32)
            kernel = (exact * size / mx.sqrt(exact.square().sum((0, 1), keepdims=True))).astype(stored.dtype)
        self.conv = Conv(kernel, weights.exact("conv.bias", dim), padding=taps // 2, groups=groups)

    def __call__(self, x: mx.array) -> mx.array:
        return gelu(self.conv(x * self.scale + self.shift)[: len(x)])  # an even kernel gives a frame too many


FAMILIES: dict[str, type[Whisper] | type[Wav2Vec2]] = {"hubert": Wav2Vec2, "wav2vec2": Wav2Vec2, "whisper": Whisper}


def check_plan(plan: Plan) -> None:
    """Whether MLX has what a plan asks for: one line where it has not."""
    if plan.family not in FAMILIES:
        raise LpaError(f"MLX has no {plan.family} here, only {', '.join(FAMILIES)}; use --backend torch or onnx")
    if not plan.base.get("head", True):
        raise LpaError("this model has no CTC head, so it cannot transcribe; train one first")


def build_network(plan: Plan, weights: Weights, symbols: int) -> Network:
    """The network of a plan, with so many outputs."""
    return FAMILIES[plan.family](plan, weights, symbols)
