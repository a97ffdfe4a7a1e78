"""The model families, by name, and one way to load any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils import cached_file

from ..errors import LpaError, choose
from ..run import find_model
from ..tokens import Tokens
from .base import Flow, MixerSite, Output, SpeechModel, own_frames
from .sepformer import SepFormer
from .speechbrain import is_speechbrain, load_speechbrain
from .wav2vec2 import NAMES, Wav2Vec2Model
from .whisper import WhisperModel

FAMILIES: dict[str, type[SpeechModel]] = {
    **dict.fromkeys(NAMES, Wav2Vec2Model),
    "whisper": WhisperModel,
    "sepformer": SepFormer,
}


def create(family: str, config: dict[str, Any], tokens: Tokens | None = None) -> SpeechModel:
    """A model with fresh weights, in eval mode. `config`: those of Hugging Face's settings and ours that differ."""
    return choose(family, FAMILIES, "family").create(family, config, tokens or Tokens())


def load(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
) -> SpeechModel:
    """A working model, in eval mode: `default`, an lpa model folder, a Hugging Face or speechbrain folder, a hub id.

    `config`: settings to have in place of an lpa model folder's own, such as another dropout.
    """
    source = find_model(str(source))
    if (Path(source) / "plan.json").is_file():
        from ..surgery import restore  # surgery builds models with create, above

        model = restore(source, config)
    elif config:
        raise LpaError(f"{source} is no lpa model folder, so its settings stay; leave out {', '.join(config)}")
    elif is_speechbrain(source):
        model = load_speechbrain(source)
    elif Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise LpaError(f"{source} has neither plan.json nor config.json; it is no model folder")
    else:
        model = load_pretrained(str(source))
    return place(model, device, dtype)


def place(model: SpeechModel, device: str | torch.device, dtype: torch.dtype | None = None) -> Any:
    """The model on a device, in eval mode."""
    try:
        return model.to(device=device, dtype=dtype).eval()
    except (RuntimeError, AssertionError) as error:
        raise LpaError(f"cannot use device {str(device)!r} ({str(error).splitlines()[0][:80]}); try cpu") from None


def load_pretrained(source: str) -> SpeechModel:
    """From Hugging Face's own format: a folder, or a hub id."""
    folder = Path(source)
    elsewhere = folder.parent.name and folder.parent.is_dir()  # models/typo, where there is a folder models
    if not folder.is_dir() and (elsewhere or source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise LpaError(f"no model folder {source}; name a folder, or a hub id (owner/name)")
    try:
        config = AutoConfig.from_pretrained(source)
        family = choose(config.model_type, FAMILIES, "family")
        settings = [read_json(source, name) for name in ("tokenizer_config.json", "preprocessor_config.json")]
        tokens = read_tokens(source, config, settings[0])
        return family.load(config.model_type, source, config, tokens, settings[1])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:  # missing, broken, unknown, misfit
        if isinstance(error, OSError) and not folder.is_dir():
            raise LpaError(f"no folder {source}, and the hub has no such model or cannot be reached") from error
        raise LpaError(f"cannot load {source}: {' '.join(str(error).split())[:200]}") from error


def read_json(source: str, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files; empty where it has none."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return {} if path is None else json.loads(Path(path).read_text())


def read_tokens(source: str, config, tokenizer: dict[str, Any]) -> Tokens | None:
    """The alphabet of a CTC checkpoint. Its padding symbol is CTC's blank."""
    ids = read_json(source, "vocab.json")
    if not ids or config.model_type == "whisper":  # whose vocabulary is its decoder's
        return None
    ids |= read_json(source, "added_tokens.json")
    if sorted(v for v in ids.values() if isinstance(v, int)) != list(range(len(ids))):
        raise LpaError(f"{source}: vocab.json is not one alphabet with ids from 0 on")
    symbols = tuple(sorted(ids, key=ids.__getitem__))
    return Tokens(symbols, config.pad_token_id, tokenizer.get("word_delimiter_token") or "|")


__all__ = ["FAMILIES", "Flow", "MixerSite", "Output", "SpeechModel", "create", "load", "own_frames", "place"]
