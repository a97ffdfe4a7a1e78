"""The best state of a stage on the held-out speakers, which a stage that made things worse goes back to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LpaError
from ..families.base import SpeechModel
from ..journal import whole_file
from .session import Session


class Keeper:
    """The best state of some parameters on the held-out speakers: the one at the start, or one of those looked at."""

    def __init__(self, path: Path, parameters: dict[str, Any], value: float | None, session: Session):
        if value is None:
            raise LpaError("a stage that may be undone needs held-out speakers to judge it by")
        self.path, self.parameters, self.session = path, parameters, session
        self.value = value
        self.start = {name: p.detach().clone() for name, p in parameters.items()}
        if path.is_file():
            self.value = self.kept()["value"]

    def kept(self) -> dict[str, Any]:
        return torch.load(self.path, map_location="cpu", weights_only=True)

    def look(self, model: SpeechModel) -> dict[str, Any]:
        """Evaluate, and keep the state unless an earlier one is better."""
        value = self.session.judge(model)
        assert value is not None
        if self.session.measure.no_worse(value, self.value):
            self.value = value
            if self.session.main:
                state = {name: p.detach().cpu() for name, p in self.parameters.items()}
                with whole_file(self.path) as file:
                    torch.save({"value": value, "state": state}, file)
            self.session.accelerator.wait_for_everyone()
        return {self.session.measure.name: value}

    @torch.no_grad()
    def restore(self) -> bool:
        """Put the best state back; whether that is the one at the start."""
        reverted = not self.path.is_file()
        state: dict[str, Tensor] = self.start if reverted else self.kept()["state"]
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])
        return reverted
