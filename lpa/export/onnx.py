"""`lpa export --to onnx`: a model folder that ONNX Runtime runs, for recordings of any length."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import LpaError
from ..families import load
from ..families.base import SpeechModel
from ..run import Listener
from ..run.onnx import MODEL, OnnxListener
from ..run.torch import TorchListener, limit_lookahead
from ..surgery import SCALE, describe, unpack
from .forms import onnx_forms

OPSET = 23  # the first with an Attention of its own
WEIGHTS = ("float32", "int8")
WHOLE = "weights.safetensors"  # what a model folder has and an export has not
TOLERANCE = 1e-3  # of logits in float32
SMALLEST_BORROWED = 4096  # numbers in a tensor that a graph in its model's folder does not hold itself
KINDS = {"F32": 1, "F16": 10, "I8": 3}  # safetensors' names, ONNX's numbers
EXAMPLE_SECONDS = 1.7  # any length will do, as long as no dimension is one or happens to equal another


class Network(nn.Module):
    """What the graph holds: prepared audio (1, …) → CTC logits (1, T, V)."""

    def __init__(self, model: SpeechModel):
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        model: Any = self.model
        if features.dim() == 2:  # a waveform, normalised: the convolutions belong to the network
            x = features.unsqueeze(1)  # (1, 1, S)
            for layer in model.trunk.feature_extractor.conv_layers:
                x = layer(x)
            features = x.transpose(1, 2)
        lengths = torch.full((1,), features.shape[1])
        return model.encode(features, lengths).logits


def export_onnx(source: str, out: str | Path, weights: str = "float32", latency: float | None = None) -> Path:
    """Write model.onnx, plan.json and processor.json for a model.

    Into the model's own folder goes model.onnx alone, and in float32 it reads its weights out of the model's file.
    latency: look no more than so many seconds ahead, from now on.
    """
    out = Path(out)
    if weights not in WEIGHTS:
        raise LpaError(f"no weights {weights!r} in ONNX; have {', '.join(WEIGHTS)}")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise LpaError(f"exporting needs {' and '.join(missing)}; type: pip install 'lpa[onnx]'")
    check_folder(Path(source), out)
    model = load(source, dtype=torch.float32)
    if not model.settings.head:
        raise LpaError(f"{source} has no CTC head, so there is nothing to export; train one first")
    if latency is not None:
        if (out / WHOLE).is_file():
            raise LpaError(f"{out} holds the model as it is; with --latency name another --out")
        limit_lookahead(model, latency)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as name, quiet():
        work = Path(name)
        trace(model).save(str(work / MODEL))
        forget_notes(work / MODEL)
        describe(model, weights, work)
        own = (out / WHOLE).is_file()  # the model's own folder, which has the rest already
        if own and weights == "float32":
            shutil.copyfile(out / WHOLE, work / WHOLE)
            borrow(work / MODEL, work / WHOLE)
        check_same(TorchListener(model), OnnxListener(work))
        if weights == "int8":
            quantise(work / MODEL)
        for file in [work / MODEL] if own else list(work.iterdir()):
            os.replace(file, out / file.name)  # it only ever appears whole
    return out


def check_same(wanted: Listener, found: Listener) -> None:
    """No graph is written that does not give the model's logits, at lengths it was not traced with."""
    rng = np.random.default_rng(0)
    for seconds in (0.5, 1.0, 1.9, 4.3):
        if wanted.facts.longest is not None and seconds > wanted.facts.longest:
            continue
        samples = 0.1 * rng.normal(size=int(seconds * wanted.sample_rate)).astype(np.float32)
        a, b = wanted.hear(samples), found.hear(samples)
        difference = float(np.abs(a - b).max()) if a.shape == b.shape else np.inf
        if not difference <= TOLERANCE * max(1.0, float(np.abs(a).max())):  # so that NaN fails
            raise LpaError(f"the exported graph differs from the model by {difference:.3g} at {seconds} s; not written")


def check_folder(source: Path, out: Path) -> None:
    """An export goes into a folder of its own, or into that of its model: never beside another model's plan."""
    if out.suffix == ".onnx":
        raise LpaError(f"an export is a folder with {MODEL} in it; name a folder, not {out}")
    if not out.exists() or (source.exists() and out.samefile(source)):
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MODEL).is_file()) or (out / WHOLE).is_file():
        raise LpaError(f"{out} exists and is not an export to be written again; export somewhere else")


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn of what they did not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def forget_notes(path: Path) -> None:
    """Drop the noted sizes of what lies in between, for planning by them ONNX Runtime takes three times the memory,
    and the notes on where in the code each operation comes from."""
    import onnx

    model = onnx.load(path)
    del model.graph.value_info[:], model.metadata_props[:], model.graph.metadata_props[:]
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    onnx.save(model, path)


def borrow(path: Path, whole: Path) -> None:
    """Have a graph read its large tensors out of the model's weights, in the precision they have there.

    They are ONNX's external data, for a safetensors file is a header and then plain bytes. ONNX Runtime makes float32
    of them when it loads the graph.
    """
    import onnx
    from safetensors.torch import load_file

    model = onnx.load(path)
    graph = model.graph
    with whole.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    stored = load_file(whole)
    values = {name: tensor.numpy() for name, tensor in unpack(stored).items() if tensor.numel() >= SMALLEST_BORROWED}
    nodes, lent = [], {}
    for tensor in [t for t in graph.initializer if np.prod(t.dims) >= SMALLEST_BORROWED]:
        wanted = onnx.numpy_helper.to_array(tensor)
        name = next((n for n, v in values.items() if np.array_equal(v, wanted) or np.array_equal(v.T, wanted)), None)
        if name is None:
            continue
        if name not in lent:
            first, last = header[name]["data_offsets"]
            number = KINDS[header[name]["dtype"]]
            found = onnx.TensorProto(name=name, dims=header[name]["shape"], data_type=number)
            found.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", WHOLE), ("offset", 8 + size + first), ("length", last - first)):
                found.external_data.add(key=key, value=str(value))
            lent[name] = found
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [], {"to": onnx.TensorProto.FLOAT})]
        if header[name]["dtype"] == "I8":
            scale = stored[name + SCALE].numpy().reshape(-1, *[1] * (values[name].ndim - 1))
            graph.initializer.append(onnx.numpy_helper.from_array(scale, f"{tensor.name}{SCALE}"))
            steps.append(("Mul", [f"{tensor.name}{SCALE}"], {}))
        if not np.array_equal(values[name], wanted):
            steps.append(("Transpose", [], {}))
        at = name
        for number, (kind, more, settings) in enumerate(steps, 1):
            to = tensor.name if number == len(steps) else f"{tensor.name}.{number}"
            nodes.append(onnx.helper.make_node(kind, [at, *more], [to], **settings))
            at = to
        graph.initializer.remove(tensor)
    graph.initializer.extend(lent.values())
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    path.write_bytes(model.SerializeToString())  # onnx.save would look for the data


def quantise(path: Path) -> None:
    """int8 weights, one scale an output channel, and int8 products; all but the head's, which costs nothing."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path).graph
    axes = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    # a product with a stack of matrices would be written, and then not run
    stacked = [node.name for node in products if any(axes.get(name, 2) != 2 for name in node.input)]
    small = path.with_suffix(".int8")
    options: dict[str, Any] = {"per_channel": True, "weight_type": QuantType.QInt8, "op_types_to_quantize": ["MatMul"]}
    quantize_dynamic(path, small, nodes_to_exclude=[*stacked, products[-1].name], **options)
    os.replace(small, path)


def trace(model: SpeechModel) -> torch.onnx.ONNXProgram:
    """The network as an ONNX program with a dynamic time axis."""
    network = Network(model).eval()
    samples = torch.randn(1, round(EXAMPLE_SECONDS * model.sample_rate), generator=torch.Generator().manual_seed(0))
    features = samples if model.family != "whisper" else model.front(samples)[0]
    with onnx_forms(), torch.no_grad(), quiet():
        program = torch.onnx.export(
            network,
            (features,),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=({1: torch.export.Dim.DYNAMIC},),
            input_names=["features"],
            output_names=["logits"],
            custom_translation_table={torch.ops.aten.softplus.default: softplus},
            verbose=False,
        )
    assert program is not None  # only the old exporter returns None
    return program


def softplus(x, beta: float = 1.0, threshold: float = 20.0):
    """log(1 + eˣ) by parts: ONNX Runtime's Softplus takes no float64."""
    from onnxscript import opset23 as op

    one = op.CastLike(op.Constant(value_float=1.0), x)  # type: ignore[type-var]
    return op.Add(op.Relu(x), op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), one)))
