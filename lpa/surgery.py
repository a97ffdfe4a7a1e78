"""Swap attention for a mixer and take it back, choose what trains, save a model as one folder and load it again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .errors import LpaError
from .families import create
from .families.base import MixerSite, SpeechModel
from .mixers import build, resolve
from .plan import Plan, Site, Swap
from .tokens import Tokens

WEIGHTS = ("float32", "float16", "int8")
SMALLEST_INT8 = 4096  # elements; below this a tensor weighs nothing and its rounding may matter
SCALE = ".scale"  # what a stored int8 tensor's scales are called after


# --- swap and undo


def swap(model: SpeechModel, site: int | Site, mixer: str, config: dict[str, Any] | None = None) -> Callable[[], None]:
    """Put a mixer, built from the attention at a site, in that attention's place. Returns the undo."""
    site = find_site(model, site)
    if site.index in model.swaps:
        raise LpaError(f"layer {site.index} already has {model.swaps[site.index].mixer!r}; undo that swap first")
    parent_path, name = site.path.rsplit(".", 1)
    parent = model.net.get_submodule(parent_path)
    attention = getattr(parent, name)
    _, resolved = resolve(mixer, config)
    home = next(attention.parameters()).device  # parameters that attention has none of are made on the CPU
    built = build(mixer, attention, resolved).to(home).train(attention.training)
    adapter = model.adapter(built, site.index).train(attention.training)

    # Nothing above touched the model; nothing below can fail.
    setattr(parent, name, adapter)
    model.swaps[site.index] = Swap(site.index, mixer, resolved.to_dict())

    def undo() -> None:
        if getattr(parent, name) is not adapter:
            raise LpaError(f"layer {site.index}: this swap has been undone already")
        setattr(parent, name, attention)
        del model.swaps[site.index]

    return undo


def find_site(model: SpeechModel, site: int | Site) -> Site:
    """The model's own site for an index, or for a Site that must be one of its own."""
    sites = model.sites()
    if not sites:
        raise LpaError(f"this {model.family} model has no attention sites; there is nothing to replace")
    index = site.index if isinstance(site, Site) else site
    if not isinstance(index, int) or not 0 <= index < len(sites):
        raise LpaError(f"no site {index}; this model has layers 0 to {len(sites) - 1}")
    if isinstance(site, Site) and site != sites[index]:
        raise LpaError(f"site {site.path} belongs to another model; here layer {index} is {sites[index].path}")
    return sites[index]


def mixer_at(model: SpeechModel, index: int) -> Any:
    """The mixer at a layer, or the attention where nothing was replaced."""
    module = model.net.get_submodule(find_site(model, index).path)
    return module.mixer if isinstance(module, MixerSite) else module


# --- what trains


def freeze(model: nn.Module) -> None:
    """Nothing trains."""
    model.requires_grad_(False)


def unfreeze(modules: Iterable[nn.Module]) -> None:
    """These train, with everything in them."""
    for module in modules:
        module.requires_grad_(True)


# --- one folder


def save(model: SpeechModel, folder: str | Path, weights: str = "float32") -> Path:
    """Write plan.json, weights.safetensors and processor.json: into a folder beside it, then renamed into place."""
    if weights not in WEIGHTS:
        raise LpaError(f"no weights {weights!r}; have {', '.join(WEIGHTS)}")
    folder = Path(folder)
    if folder.exists() and not (folder / "plan.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise LpaError(f"{folder} exists and is no model folder; save somewhere else")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        fresh = Path(work) / "model"
        fresh.mkdir()
        save_file(pack(model.net.state_dict(), weights), fresh / "weights.safetensors")
        describe(model, weights, fresh)
        shutil.copymode(fresh / "plan.json", fresh / "weights.safetensors")  # safetensors lets only its owner read it
        if folder.exists():
            for kept in folder.iterdir():  # a model card and the like stay with the model
                if not (fresh / kept.name).exists() and kept.suffix != ".onnx":  # a graph of other weights
                    copy = shutil.copytree if kept.is_dir() else shutil.copy2
                    copy(kept, fresh / kept.name)
            os.rename(folder, Path(work) / "old")
        os.rename(fresh, folder)
    return folder


def describe(model: SpeechModel, weights: str, folder: Path) -> None:
    """Write plan.json and processor.json: what a runtime needs beside the weights."""
    plan = Plan(model.family, model.base(), tuple(model.swaps[i] for i in sorted(model.swaps)), weights)
    processor = {
        "sample_rate": model.sample_rate,
        "frame_rate": model.frame_rate,
        "tokens": model.tokens.to_dict(),
        "audio": model.preparation(),
    }
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "processor.json").write_text(json.dumps(processor, indent=1, ensure_ascii=False) + "\n")


def restore(folder: str | Path, config: dict[str, Any] | None = None) -> SpeechModel:
    """The model a folder holds, in eval mode; every tensor must be there, and none may be left over.

    `config`: settings to have in place of the folder's.
    """
    folder = Path(folder)
    plan = Plan.read(folder)
    processor = read_processor(folder)
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are all overwritten: loading moves no seed
        model = create(plan.family, {**plan.base, **(config or {})}, Tokens.from_dict(processor["tokens"]))
        for step in plan.swaps:
            swap(model, step.index, step.mixer, step.config)
    load_weights(model.net, folder / "weights.safetensors")
    return model.eval()


def read_processor(folder: Path) -> dict[str, Any]:
    path = folder / "processor.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise LpaError(f"{folder} has no processor.json; the model folder is damaged") from None
    except json.JSONDecodeError as error:
        raise LpaError(f"{path} is not JSON ({error}); the model folder is damaged") from None
    if not isinstance(data, dict) or "tokens" not in data:
        raise LpaError(f"{path} has no tokens; the model folder is damaged")
    return data


def load_weights(net: nn.Module, path: Path) -> None:
    """Load strictly: whatever is missing, left over or of another shape is named, and nothing is loaded then."""
    stored = unpack(read_tensors(path))
    wanted = net.state_dict()
    faults = [f"missing {k}" for k in wanted if k not in stored]
    faults += [f"unknown {k}" for k in stored if k not in wanted]
    for name in wanted.keys() & stored.keys():
        if wanted[name].shape != stored[name].shape:
            faults.append(f"{name} is {tuple(stored[name].shape)}, not {tuple(wanted[name].shape)}")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise LpaError(f"{path} does not fit its plan: {'; '.join(faults[:8])}{more}")
    net.load_state_dict(stored)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except FileNotFoundError:
        raise LpaError(f"{path.parent} has no {path.name}; the model folder is damaged") from None
    except SafetensorError as error:
        raise LpaError(f"{path} is cut short or corrupt ({error}); fetch or save it again") from None


def pack(state: dict[str, Tensor], weights: str) -> dict[str, Tensor]:
    """Tensors as they are stored. int8 keeps one scale an output channel; vectors stay float32, they weigh nothing."""
    stored = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            stored[name] = tensor.contiguous()
        elif weights == "int8" and tensor.dim() >= 2 and tensor.numel() >= SMALLEST_INT8:
            stored[name], stored[name + SCALE] = quantise(tensor.float())
        else:
            half = weights != "float32" and tensor.dim() >= 2
            stored[name] = tensor.to(torch.float16 if half else torch.float32).contiguous()
    return stored


def unpack(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 tensors from stored ones."""
    state = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            if name + SCALE not in stored:
                raise LpaError(f"weights.safetensors has no {name + SCALE}; the model folder is damaged")
            scale = stored[name + SCALE]
            state[name] = tensor.float() * scale.reshape(-1, *[1] * (tensor.dim() - 1))
        elif stored.get(name.removesuffix(SCALE), tensor).dtype != torch.int8:  # else a scale, used above
            state[name] = tensor.float() if tensor.is_floating_point() else tensor
    return state


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, one scale an output channel (dimension 0)."""
    scale = tensor.flatten(1).abs().amax(1).clamp(min=1e-12) / 127  # (O,)
    rounded = (tensor / scale.reshape(-1, *[1] * (tensor.dim() - 1))).round()
    return rounded.to(torch.int8), scale
