"""One line of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for one subject, and why.

    Attributes:
        subject: What was to be chosen, such as ``"accelerator"``.
        value: What was chosen, such as ``"cpu"``.
        reason: Why, a few words.
        owner: The distribution that brings it, such as ``"dstrat 0.1.0"``; empty for the user's own.
    """

    subject: str
    value: str
    reason: str
    owner: str = ""
