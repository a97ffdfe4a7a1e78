"""The encoder of Whisper with a character CTC head, for audio of any length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from ..errors import LpaError
from ..tokens import Tokens
from .base import ATTENTION, Output, SpeechModel, broadcast_mask, check_audio, own_frames, padding_mask, split_settings

FFT, HOP = 400, 160  # samples: 25 ms windows, one every 10 ms
USUAL = 800  # frames of an utterance, 16 s


@dataclass(frozen=True)
class WhisperSettings:
    """What we configure beside transformers' own configuration."""

    mel_floor: str | float = "recording"  # 8 below the recording's own peak (Whisper's), or a fixed log10 power
    positions: bool = True  # add Whisper's position embedding; else its one row to every frame: audio of any length
    head: bool = True  # a CTC head, or the bare encoder

    def __post_init__(self):
        if isinstance(self.mel_floor, str) and self.mel_floor != "recording":
            raise LpaError(f"mel_floor {self.mel_floor!r} is neither 'recording' nor a number in log10 units")


class LogMel(nn.Module):
    """Whisper's log-mel features, of each sample's own audio alone. Float32 whatever the model's precision."""

    def __init__(self, mels: int, floor: str | float):
        super().__init__()
        self.mels, self.floor = mels, floor
        self.filters: Tensor
        self.register_buffer("filters", self.slaney(), persistent=False)  # (F, M)

    def slaney(self) -> Tensor:
        filters = mel_filter_bank(1 + FFT // 2, self.mels, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
        return torch.from_numpy(filters).float()

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self.filters = self.slaney().to(self.filters.device)  # model.half() moves it, but must not round it
        return self

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S), own samples (B,) → (B, M frames, mels), own mel frames (B,)."""
        frames = -(-audio.shape[1] // HOP)
        mask = own_frames(lengths, audio.shape[1])
        audio = audio.float().masked_fill(~mask, 0)
        # Zeros and not a reflection on either side: the first and last frames then see this audio only once.
        audio = F.pad(audio, (FFT // 2, FFT // 2 + frames * HOP - audio.shape[1]))
        window = torch.hann_window(FFT, device=audio.device)
        with torch.autocast(audio.device.type, enabled=False):
            spectrum = torch.stft(audio, FFT, HOP, window=window, center=False, return_complex=True)[..., :frames]
            power = spectrum.real.square() + spectrum.imag.square()  # (B, F, M)
            mel = power.transpose(1, 2) @ self.filters  # (B, M, mels)
        log = mel.clamp(min=1e-10).log10()
        lengths = mel_frames(lengths)
        own = own_frames(lengths, frames).unsqueeze(-1)
        if self.floor == "recording":
            log = torch.maximum(log, log.masked_fill(~own, -torch.inf).amax((1, 2), keepdim=True) - 8)
        else:
            log = log.clamp(min=float(self.floor))
        return ((log + 4) / 4).masked_fill(~own, 0), lengths


def mel_frames(samples):
    return (samples + HOP - 1) // HOP


class EncoderWithHead(nn.Module):
    """Whisper's encoder as transformers has it, and a linear layer that reads characters off it."""

    def __init__(self, encoder: WhisperEncoder, symbols: int | None):
        super().__init__()
        self.encoder = encoder
        if symbols is not None:
            self.head = nn.Linear(encoder.config.d_model, symbols)


class WhisperModel(SpeechModel):
    """Whisper's encoder with our own loop over its layers: transformers' insists on 30 s and knows no padding."""

    Settings = WhisperSettings
    attention_name = "self_attn"

    def __init__(self, family: str, encoder: WhisperEncoder, settings: WhisperSettings, tokens: Tokens):
        net = EncoderWithHead(encoder, len(tokens) if settings.head else None)
        super().__init__(family, net, encoder.config, settings, tokens)
        self.config._attn_implementation = ATTENTION
        self.config.encoder_layerdrop = encoder.layerdrop = 0.0  # a dropped layer would break what mixers pass on
        self.log_mel = LogMel(self.config.num_mel_bins, settings.mel_floor)
        self.fading = 0.0  # share of the position embedding that is still added, while training takes it away
        self.faded = torch.empty(0)  # what it was, less its mean
        encoder.register_forward_pre_hook(self.flow.enter_unmasked)
        encoder.register_forward_hook(self.flow.leave_encoder)

    @property
    def encoder(self) -> Any:
        return self.net.encoder

    @property
    def width(self) -> tuple[int, int]:
        return self.config.d_model, self.config.encoder_attention_heads

    def frames(self, samples):
        """Output frames for that many samples: a number, or a tensor of lengths."""
        return (mel_frames(samples) + 1) // 2

    def front(self, audio: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lengths = check_audio(audio, lengths, shortest=1)
        features, lengths = self.log_mel(audio, lengths)
        return features.to(self.dtype), lengths

    def encode(self, features: Tensor, lengths: Tensor, hidden: bool = False) -> Output:
        encoder = self.encoder
        mask = padding_mask(lengths, features.shape[1])
        x = features.transpose(1, 2)  # (B, mels, M)
        x = F.gelu(encoder.conv1(x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0)))
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0)  # the edge conv2 would see in a single sample
        x = F.gelu(encoder.conv2(x)).transpose(1, 2)  # (B, T, D)
        lengths = (lengths + 1) // 2
        x = F.dropout(self.add_positions(x), p=encoder.dropout, training=self.training)
        mask = padding_mask(lengths, x.shape[1])
        attention_mask = broadcast_mask(mask)
        after = []
        self.flow.begin(mask)
        for layer in encoder.layers:
            x = layer(x, attention_mask)
            if hidden:
                after.append(x)
        self.flow.end()
        x = encoder.layer_norm(x)
        return Output(self.net.head(x) if self.settings.head else None, lengths, x, after)

    def add_positions(self, x: Tensor) -> Tensor:
        table = self.encoder.embed_positions.weight
        if not self.settings.positions and not self.fading:
            return x + table[0]
        most = len(table if self.settings.positions else self.faded)
        if x.shape[1] > most:
            raise LpaError(
                f"{x.shape[1] / self.frame_rate:.0f} s of audio, but this model has positions for "
                f"{most / self.frame_rate:.0f} s; cut it into pieces, or use a model made with positions = false"
            )
        if self.settings.positions:
            return x + table[: x.shape[1]]
        return x + table[0] + self.fading * self.faded[: x.shape[1]].to(x.device)

    def drop_positions(self) -> None:
        """All frames are in one place from now on, the mean of an utterance's.

        `fading` may lend a share of the way from there back while the model is trained.
        """
        embedding = self.encoder.embed_positions
        table = embedding.weight.detach()
        place = table[:USUAL].mean(0, keepdim=True)
        self.faded = table - place
        self.encoder.embed_positions = nn.Embedding.from_pretrained(place, freeze=not embedding.weight.requires_grad)
        self.config.max_source_positions = 1
        self.settings = replace(self.settings, positions=False)

    @property
    def longest(self) -> float | None:
        """Seconds of audio that it can hear at once; None: any number."""
        return self.encoder.embed_positions.num_embeddings / self.frame_rate if self.settings.positions else None

    def preparation(self) -> dict[str, Any]:
        mel = {"fft": FFT, "hop": HOP, "mels": self.config.num_mel_bins, "floor": self.settings.mel_floor}
        return {"kind": "log-mel", **mel}

    @classmethod
    def create(cls, family: str, config: dict[str, Any], tokens: Tokens) -> WhisperModel:
        """Fresh weights, from one flat dict of transformers' and our own settings."""
        hf, settings = split_settings(family, config, transformers.WhisperConfig, cls.Settings)
        if not settings.positions:
            hf.max_source_positions = 1
        try:
            model = cls(family, WhisperEncoder(hf), settings, tokens).eval()
        except ValueError as error:  # heads that do not divide the width, say
            raise LpaError(f"{family} configuration is not valid: {' '.join(str(error).split())}") from error
        if not settings.positions:
            nn.init.zeros_(model.encoder.embed_positions.weight)
        return model

    @classmethod
    def load(cls, family: str, source: str, config, tokens: Tokens | None, preprocessor: dict) -> WhisperModel:
        """The bare encoder of a Hugging Face checkpoint of the whole Whisper."""
        whole: Any = transformers.WhisperModel
        net, report = whole.from_pretrained(source, config=config, dtype=torch.float32, output_loading_info=True)
        missing = sorted(k for k in report["missing_keys"] if k.startswith("encoder."))
        if missing:
            raise LpaError(f"{source} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)")
        return cls(family, net.encoder, cls.Settings(head=False), tokens or Tokens()).eval()
