"""An ONNX graph run by torch, node by node: the operators that a Piper voice is made of, on any device, for any batch.

Shapes and whole-number constants stay on the CPU, where torch wants them; all else is on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool}


def _both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two operands on one device: the one that is not on the CPU decides. A lone number may stay where it is."""
    if a.device == b.device or a.dim() == 0 or b.dim() == 0:
        return a, b
    return (a.to(b.device, non_blocking=True), b) if a.device.type == "cpu" else (a, b.to(a.device, non_blocking=True))


def _binary(op: Callable[[Tensor, Tensor], Tensor]):
    return lambda a, b, **_: op(*_both(a, b))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _gather(x: Tensor, index: Tensor, axis: int = 0, **_) -> Tensor:
    if index.dim() == 0 and index.device.type == "cpu":
        return x.select(axis, int(index))
    x, index = _both(x, index)
    index = torch.where(index < 0, index + x.shape[axis], index)
    return x.index_select(axis, index.flatten()).reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor | None = None, **_) -> Tensor:
    every = [1] * len(starts) if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(), every, strict=True):
        size = x.shape[axis]
        if step < 0:
            x, start, end, step = x.flip(axis), size - 1 - (start % size if start < 0 else start), None, -step
            x = x.narrow(axis, max(start, 0), size - max(start, 0))
        else:
            start, end = (max(0, v + size) if v < 0 else min(v, size) for v in (start, end))
            x = x.narrow(axis, start, max(0, end - start))
        x = x[(slice(None),) * (axis % x.dim()) + (slice(None, None, step),)] if step != 1 else x
    return x


def _pad(x: Tensor, pads: Tensor, value: Tensor | None = None, **_) -> Tensor:
    half = len(pads) // 2
    sides = [
        side
        for before, after in zip(pads[:half].tolist(), pads[half:].tolist(), strict=True)
        for side in (after, before)
    ]
    return F.pad(x, sides[::-1], value=0.0 if value is None else float(value))


def _reshape(x: Tensor, shape: Tensor, **_) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def _expand(x: Tensor, shape: Tensor, **_) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist())))


def _unsqueeze(x: Tensor, axes: Tensor, **_) -> Tensor:
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _scatter(x: Tensor, index: Tensor, updates: Tensor, **_) -> Tensor:
    x, index = _both(x, index)
    return x.index_put(tuple(index.unbind(-1)), updates.to(x.device))


def _where(condition: Tensor, a: Tensor, b: Tensor, **_) -> Tensor:
    device = next((x.device for x in (condition, a, b) if x.device.type != "cpu"), a.device)
    return torch.where(condition.to(device), a.to(device), b.to(device))


def _reduce(op: Callable[..., Tensor]):
    def reduce(x: Tensor, given: Tensor | None = None, axes: list[int] | None = None, keepdims: int = 1, **_) -> Tensor:
        dims = given.tolist() if given is not None else axes if axes is not None else list(range(x.dim()))
        return op(x, dim=dims, keepdim=bool(keepdims))

    return reduce


def _gather_elements(x: Tensor, index: Tensor, axis: int = 0, **_) -> Tensor:
    x, index = _both(x, index)
    return x.gather(axis, torch.where(index < 0, index + x.shape[axis], index))


def _gather_nd(x: Tensor, index: Tensor, **_) -> Tensor:
    x, index = _both(x, index)
    return x[tuple(index.unbind(-1))]


def _concat(*parts: Tensor, axis: int) -> Tensor:
    device = next((p.device for p in parts if p.device.type != "cpu"), parts[0].device)
    return torch.cat([p.to(device) for p in parts], axis)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads, strides, dilations, group, **_) -> Tensor:
    return F.conv1d(F.pad(x, tuple(pads)), weight, bias, strides[0], 0, dilations[0], group)


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _binary(torch.add),
    "Sub": _binary(torch.sub),
    "Mul": _binary(torch.mul),
    "Div": _binary(_divide),
    "Pow": _binary(torch.pow),
    "MatMul": _binary(torch.matmul),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "GreaterOrEqual": _binary(torch.ge),
    "Equal": _binary(torch.eq),
    "And": _binary(torch.logical_and),
    "Not": lambda x, **_: ~x,
    "Neg": lambda x, **_: -x,
    "Exp": lambda x, **_: x.exp(),
    "Erf": lambda x, **_: x.erf(),
    "Ceil": lambda x, **_: x.ceil(),
    "Sqrt": lambda x, **_: x.sqrt(),
    "Relu": lambda x, **_: x.relu(),
    "Softplus": lambda x, **_: F.softplus(x),
    "Softmax": lambda x, axis=-1, **_: x.softmax(axis),
    "Clip": lambda x, low, high=None, **_: x.clamp(float(low), None if high is None else float(high)),
    "Cast": lambda x, to, **_: x.to(TYPES[to]),
    "CumSum": lambda x, axis, **_: x.cumsum(int(axis)),
    "Shape": lambda x, **_: torch.tensor(x.shape),
    "Range": lambda start, end, step, **_: torch.arange(int(start), int(end), int(step)),
    "ConstantOfShape": lambda shape, value, **_: torch.full(shape.tolist(), value.item()),
    "RandomNormalLike": lambda x, **_: torch.randn_like(x, dtype=torch.float32),
    "NonZero": lambda x, **_: x.nonzero().T,
    "GatherND": _gather_nd,
    "Concat": _concat,
    "Split": lambda x, sizes, axis=0, **_: x.split(sizes.tolist(), axis),
    "Transpose": lambda x, perm, **_: x.permute(perm),
    "Squeeze": lambda x, axes, **_: x.squeeze(tuple(axes.tolist())),
    "Unsqueeze": _unsqueeze,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Slice": _slice,
    "Pad": _pad,
    "Reshape": _reshape,
    "Expand": _expand,
    "ScatterND": _scatter,
    "Where": _where,
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax),
    "Conv": _conv,
}


class Graph:
    """A network's nodes up to `outputs`, in the order they are stored, which is one they can run in."""

    def __init__(self, network: onnx.ModelProto, outputs: list[str], device: str):
        graph, self.outputs, self.device = network.graph, outputs, device
        needed, nodes = set(outputs), []
        for node in reversed(graph.node):
            if needed & set(node.output):
                needed |= set(node.input)
                nodes.append(node)
        self.values: dict[str, Tensor] = {}
        for tensor in graph.initializer:
            if tensor.name in needed:
                self.values[tensor.name] = self._place(onnx.numpy_helper.to_array(tensor))
        self.steps = [
            (OPERATORS[n.op_type], list(n.input), list(n.output), self._attributes(n)) for n in reversed(nodes)
        ]

    def _place(self, array: np.ndarray) -> Tensor:
        value = torch.from_numpy(array.copy())
        return value.to(self.device) if value.is_floating_point() and value.dim() else value

    def _attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in found.items()}

    @torch.inference_mode()
    def __call__(self, **given: Tensor) -> list[Tensor]:
        """The outputs for inputs by name; a value that a node would make may be given too, and is taken as it is."""
        values = {**self.values, **given}
        for operator, inputs, outputs, attributes in self.steps:
            if outputs[0] in given:
                continue
            made = operator(*(values[name] if name else None for name in inputs), **attributes)
            values.update(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))
        return [values[name] for name in self.outputs]
