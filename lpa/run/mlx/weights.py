"""A model folder's weights in MLX: read strictly, matrices in the precision they multiply in, all else in float32."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ...errors import LpaError, choose

FILE = "weights.safetensors"
SCALE = ".scale"  # what a stored int8 tensor's scales are called after
PRECISIONS = {"float32": mx.float32, "float16": mx.float16}


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """The tensors of a model folder, those stored as int8 in float32."""
    path = folder / FILE
    if not path.is_file():
        instead = "use --backend onnx, or the folder it was made from" if (folder / "model.onnx").is_file() else ""
        raise LpaError(f"{folder} has no {FILE}; {instead or 'the model folder is damaged'}")
    try:
        stored: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        mx.eval(stored)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise LpaError(f"{path} is cut short or corrupt ({reason}); fetch or save it again") from None
    return unpack(stored)


def unpack(stored: dict[str, mx.array]) -> dict[str, mx.array]:
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == mx.int8:
            if name + SCALE not in stored:
                raise LpaError(f"{FILE} has no {name + SCALE}; the model folder is damaged")
            scale = stored[name + SCALE].reshape(-1, *[1] * (tensor.ndim - 1))
            tensors[name] = tensor.astype(mx.float32) * scale
        elif name not in {other + SCALE for other in stored if stored[other].dtype == mx.int8}:
            tensors[name] = tensor
    return tensors


def in_precision(tensors: dict[str, mx.array], precision: str) -> dict[str, mx.array]:
    """Matrices in float32 or float16; vectors stay float32, they weigh nothing."""
    dtype = choose(precision, PRECISIONS, "precision of weights")
    return {
        name: tensor.astype(dtype if tensor.ndim >= 2 else mx.float32)
        if mx.issubdtype(tensor.dtype, mx.floating)
        else tensor
        for name, tensor in tensors.items()
    }


def write_tensors(tensors: dict[str, mx.array], folder: Path) -> None:
    mx.save_safetensors(str(folder / FILE), tensors, {"format": "pt"})


class Weights:
    """Tensors by name. Each is asked for with its shape, and what nobody asked for can be listed."""

    def __init__(self, tensors: dict[str, mx.array], prefix: str = "", taken: set[str] | None = None):
        self.tensors, self.prefix = tensors, prefix
        self.taken: set[str] = set() if taken is None else taken

    def at(self, prefix: str) -> Weights:
        """Those whose names go on after a prefix."""
        return Weights(self.tensors, f"{self.prefix}{prefix}.", self.taken)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def matrix(self, name: str, *shape: int) -> mx.array:
        """A tensor in its own precision, to multiply with."""
        full = self.prefix + name
        if full not in self.tensors:
            raise LpaError(f"{FILE} does not fit its plan: missing {full}")
        found = self.tensors[full]
        if found.shape != shape:
            raise LpaError(f"{FILE} does not fit its plan: {full} is {found.shape}, not {shape}")
        self.taken.add(full)
        return found

    def exact(self, name: str, *shape: int) -> mx.array:
        """A tensor in float32, whatever it is stored in."""
        return self.matrix(name, *shape).astype(mx.float32)

    def check_all_taken(self, *unused: str) -> None:
        """Nothing may be left over but what ends in one of these."""
        left = sorted(name for name in self.tensors.keys() - self.taken if not name.endswith(unused))
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise LpaError(f"{FILE} does not fit its plan: unknown {', '.join(left[:8])}{more}")
