"""Read SepFormer from speechbrain's files: hyperparams.yaml, encoder.ckpt, masknet.ckpt, decoder.ckpt."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from transformers.utils import cached_file

from ..errors import LpaError
from .sepformer import SepFormer


class Hyperparams(yaml.SafeLoader):
    """hyperparams.yaml as plain data: what it would build (!new:…) stays the settings that it would be built with."""

    def plain(self, tag: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        return self.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value


Hyperparams.add_multi_constructor("!", Hyperparams.plain)


def is_speechbrain(source: str | Path) -> bool:
    """Whether this is a folder with speechbrain's files, or a hub id of speechbrain's own."""
    return (Path(source) / "hyperparams.yaml").is_file() or str(source).startswith("speechbrain/")


def load_speechbrain(source: str | Path) -> SepFormer:
    """A speechbrain folder or hub id: hyperparams.yaml, encoder.ckpt, masknet.ckpt and decoder.ckpt. In eval mode."""
    source = str(source)
    try:
        with open(find_file(source, "hyperparams.yaml"), encoding="utf-8") as file:
            settings = read_settings(yaml.load(file, Hyperparams))  # a SafeLoader: it builds no objects
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LpaError(f"{source}: hyperparams.yaml cannot be read ({' '.join(str(error).split())[:80]})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise LpaError(f"{source}: hyperparams.yaml describes no SepFormer of the kind known here ({error})") from None
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are all overwritten: loading moves no seed
        model = SepFormer.create("sepformer", settings)
    state: dict[str, torch.Tensor] = {}
    for part in ("encoder", "masknet", "decoder"):
        try:
            stored = torch.load(find_file(source, f"{part}.ckpt"), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError):
            raise LpaError(f"{source}: {part}.ckpt is cut short or corrupt; fetch it again") from None
        # Tables of sines and cosines are stored as well, up to 2500 positions; here they are computed, for any number.
        state |= {f"{part}.{name}": tensor for name, tensor in stored.items() if not name.endswith("pos_enc.pe")}
    try:
        model.net.load_state_dict(state)
    except RuntimeError as error:
        raise LpaError(f"{source} does not fit its hyperparams.yaml: {' '.join(str(error).split())[:200]}") from None
    return model


def read_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Our settings from what hyperparams.yaml says of the parts; a value may be another's name (<sample_rate>)."""
    parts = [data[name] for name in ("Encoder", "MaskNet", "SBtfintra", "SBtfinter")]
    encoder, mask, intra, inter = ({k: data.get(str(v).strip("<>"), v) for k, v in part.items()} for part in parts)
    alike = ("d_model", "nhead", "d_ffn", "norm_before")
    if any(intra.get(k) != inter.get(k) for k in alike) or int(mask["in_channels"]) != int(intra["d_model"]):
        raise ValueError("its paths differ in width, heads or norms")
    if int(mask["num_spks"]) != 1:
        raise ValueError(f"it separates {mask['num_spks']} speakers")
    if not mask.get("skip_around_intra", True) or mask.get("linear_layer_after_inter_intra", True):
        raise ValueError("its paths end in linear layers or have no way around")
    return {
        "width": int(intra["d_model"]),
        "heads": int(intra["nhead"]),
        "ffn": int(intra.get("d_ffn", 2048)),
        "blocks": int(mask.get("num_layers", 1)),
        "intra_layers": int(intra["num_layers"]),
        "inter_layers": int(inter["num_layers"]),
        "kernel": int(encoder["kernel_size"]),
        "chunk": int(mask.get("K", 200)),
        "norm": mask.get("norm", "ln"),
        "norm_before": bool(intra.get("norm_before", False)),
        "intra_positions": bool(intra.get("use_positional_encoding", False)),
        "inter_positions": bool(inter.get("use_positional_encoding", False)),
        "dropout": float(intra.get("dropout", 0.1)),
        "sample_rate": int(data["sample_rate"]),
    }


def find_file(source: str, name: str) -> str:
    """The path of one file of a folder, or of a hub id."""
    folder = Path(source)
    if folder.is_dir() and not (folder / name).is_file():
        raise LpaError(f"{source} has no {name}; it is no SepFormer folder")
    elsewhere = folder.parent.name and folder.parent.is_dir()  # models/typo, where there is a folder models
    if not folder.is_dir() and (elsewhere or source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise LpaError(f"no model folder {source}; name a folder, or a hub id (owner/name)")
    try:
        return str(cached_file(source, name))
    except (OSError, ValueError) as error:
        raise LpaError(f"no folder {source}, and the hub has no {name} under that name or cannot be reached") from error
