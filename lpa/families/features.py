"""The convolutions of a wav2vec2, frames first: each is then two products with views of its input, no copy.

At work on the CPU a few seconds of a recording go through all layers at a time (`convolve`): a piece stays in the
cache, and the memory it takes does not grow with the recording. A batch, in training or on a GPU, goes through layer
by layer (`convolve_batch`). The first layer's group norm is over a whole recording. Its mean and variance follow from
those of the few samples under the kernel, so they are known before anything is convolved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIECE = 100  # frames computed together: 2 s
WINDOWS = 1 << 16  # windows of samples whose products are summed at once, in float64


def fits(audio: Tensor, layers: Any) -> bool:
    """Whether `convolve` is the one to take this: inference in float32 on a CPU, through layers it knows."""
    plain = audio.device.type == "cpu" and layers[0].conv.weight.dtype == torch.float32
    plain = plain and not torch.is_autocast_enabled("cpu")
    return plain and not torch.is_grad_enabled() and known(layers)


def known(layers: Any) -> bool:
    """Whether these are layers that can be had as products, and nobody is drawing a graph of them."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    norms = [getattr(layer, "layer_norm", None) for layer in layers]
    first = norms[0] is None or isinstance(norms[0], nn.LayerNorm) or norms[0].num_groups == norms[0].num_channels
    later = all(norm is None or isinstance(norm, nn.LayerNorm) for norm in norms[1:])
    strides = [(layer.conv.stride[0], layer.conv.kernel_size[0]) for layer in layers]
    return first and later and all(stride <= kernel <= 2 * stride for stride, kernel in strides)


def convolve(audio: Tensor, layers: Any, frames: int) -> Tensor:
    """audio (B, S) → (B, T, C), what the layers one after the other give, to rounding; `frames` is T."""
    stride, reach = 1, 1  # samples from one frame to the next, and that one frame sees
    for layer in layers:
        reach += (layer.conv.kernel_size[0] - 1) * stride
        stride *= layer.conv.stride[0]
    later = [Convolution(layer) for layer in layers[1:]]
    y = audio.new_empty(len(audio), frames, layers[-1].conv.out_channels)
    for row, samples in enumerate(audio.float()):
        first = Convolution(layers[0], samples)
        for at in range(0, frames, PIECE):
            stop = min(at + PIECE, frames)
            x = samples[at * stride : (stop - 1) * stride + reach].unsqueeze(1)  # (S', 1)
            for convolution in (first, *later):
                x = convolution(x)
            y[row, at:stop] = x
    return y


def convolve_batch(audio: Tensor, lengths: Tensor | None, layers: Any) -> Tensor:
    """audio (B, S), blank past each row's length → (B, T, C), what the layers give for every row's own frames."""
    x = audio.to(layers[0].conv.weight.dtype).unsqueeze(-1)  # (B, S, 1)
    for layer in layers:
        conv, norm = layer.conv, getattr(layer, "layer_norm", None)
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        if isinstance(norm, nn.GroupNorm):
            weight, shift = norm_into(conv, norm, audio, lengths)  # (B, C, kernel), (B, C)
            windows = audio.to(weight.dtype).unfold(1, kernel, stride)  # (B, T, kernel)
            y = torch.baddbmm(shift.unsqueeze(1), windows, weight.transpose(1, 2))
        else:
            y = product(x, conv.weight, conv.bias, stride)
            y = y if norm is None else norm(y)
        x = layer.activation(y)
    return x


def product(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The convolution of x (B, S, C) with weight (O, C, kernel): rows of `stride` inputs, and the next row's start."""
    frames, kernel = x.shape[1], weight.shape[2]
    count = (frames - kernel) // stride + 1
    whole = (count + 1) * stride
    rows = F.pad(x, (0, 0, 0, max(0, whole - frames)))[:, :whole].reshape(len(x), count + 1, -1)  # (B, T + 1, stride·C)
    taps = weight.transpose(1, 2)  # (O, kernel, C)
    y = F.linear(rows[:, :count], taps[:, :stride].flatten(1), bias)
    if kernel == stride:
        return y
    return y + F.linear(rows[:, 1:, : (kernel - stride) * x.shape[2]], taps[:, stride:].flatten(1))


def norm_into(conv: Any, norm: nn.GroupNorm, audio: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """`fold_norm` for a batch, with gradients: every row's own weight (B, O, kernel) and bias (B, O).

    In float64, as there: what a filter lets through can be so little of the samples' power that float32 rounds it away.
    """
    with torch.autocast(audio.device.type, enabled=False):
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        windows = audio.double().unfold(1, kernel, stride)  # (B, T, kernel)
        frames = torch.full((len(audio), 1), windows.shape[1], device=audio.device)
        if lengths is not None:
            frames = ((lengths - kernel) // stride + 1).clamp(min=1).unsqueeze(1)  # (B, 1)
        own = (torch.arange(windows.shape[1], device=audio.device) < frames).unsqueeze(-1)  # (B, T, 1)
        count = frames.unsqueeze(-1)
        mean = (windows * own).sum(1, keepdim=True) / count  # (B, 1, kernel)
        centred = (windows - mean) * own
        covariance = centred.transpose(1, 2) @ centred / count  # (B, kernel, kernel)
        w = conv.weight.squeeze(1).double()  # (O, kernel)
        variance = ((w @ covariance) * w).sum(-1).clamp(min=0)  # (B, O)
        scale = norm.weight.double() * torch.rsqrt(variance + norm.eps)
        shift = norm.bias.double() - scale * (mean @ w.T).squeeze(1)
        return (w * scale.unsqueeze(-1)).to(conv.weight.dtype), shift.to(conv.weight.dtype)


class Convolution:
    """One layer: its convolution, norm and activation on frames (T, C). `samples`: those a group norm is over."""

    def __init__(self, layer: Any, samples: Tensor | None = None):
        conv, norm = layer.conv, getattr(layer, "layer_norm", None)
        self.kernel, self.stride = conv.kernel_size[0], conv.stride[0]
        weight, bias = conv.weight, conv.bias  # (O, C, kernel), (O,) or None
        if isinstance(norm, nn.GroupNorm):
            assert samples is not None  # only the first layer has one
            weight, bias = fold_norm(weight, bias, norm, samples.unfold(0, self.kernel, self.stride))
            norm = None
        self.norm, self.activation = norm, layer.activation
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        taps = weight.permute(2, 1, 0)  # (kernel, C, O)
        self.whole = taps.flatten(0, 1)  # (kernel · C, O)
        self.near, self.far = self.whole.split(
            [self.stride * taps.shape[1], (self.kernel - self.stride) * taps.shape[1]]
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A frame's first `stride` inputs are a row of x itself; the rest of its inputs begin the row after."""
        count = (len(x) - self.kernel) // self.stride + 1
        step = self.stride * x.shape[1]
        if x.shape[1] == 1:  # samples: their windows weigh nothing, so one product does it
            return self.finish(torch.addmm(self.bias, x.squeeze(1).unfold(0, self.kernel, self.stride), self.whole))
        y = torch.addmm(self.bias, x[: count * self.stride].view(count, step), self.near)
        if len(self.far):
            y.addmm_(x.as_strided((count, len(self.far)), (step, 1), x.storage_offset() + step), self.far)
        return self.finish(y)

    def finish(self, y: Tensor) -> Tensor:
        if self.norm is not None:
            y = self.norm(y)
        return torch.ops.aten.gelu_(y) if is_gelu(self.activation) else self.activation(y)


def is_gelu(activation: Any) -> bool:
    """Whether an activation is the exact GELU, which can be had in place."""
    return isinstance(activation, nn.GELU) or getattr(activation, "act", None) is F.gelu


def fold_norm(weight: Tensor, bias: Tensor | None, norm: nn.GroupNorm, windows: Tensor) -> tuple[Tensor, Tensor]:
    """The weight (O, 1, K) and bias that give the normalised output at once; windows (T, K) of the samples."""
    total = torch.zeros(windows.shape[1], dtype=torch.float64)
    square = torch.zeros(windows.shape[1], windows.shape[1], dtype=torch.float64)
    for some in windows.split(WINDOWS):
        some = some.double()
        total += some.sum(0)
        square += some.T @ some
    mean = total / len(windows)
    covariance = square / len(windows) - mean.outer(mean)
    w = weight.squeeze(1).double()  # (O, K)
    variance = ((w @ covariance) * w).sum(1).clamp(min=0)
    scale = norm.weight.double() * torch.rsqrt(variance + norm.eps)
    shift = norm.bias.double() - scale * (w @ mean)  # the convolution's own bias goes with the mean
    return (w * scale.unsqueeze(1)).unsqueeze(1).float(), shift.float()
