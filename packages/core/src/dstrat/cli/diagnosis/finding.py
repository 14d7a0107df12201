"""Finding of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingState = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        subject: What it is about.
        text: What was found, and what to do about it.
        state: ``"ok"``; ``"note"`` where it may explain something; ``"problem"`` where something will not work.
    """

    subject: str
    text: str
    state: FindingState = "ok"
