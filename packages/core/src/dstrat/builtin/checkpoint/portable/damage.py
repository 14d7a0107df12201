"""The error about a checkpoint that is not as it was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from dstrat.builtin.checkpoint.place import Place


def damaged(folder: Place, what: str) -> CheckpointError:
    """Return the error; what is wrong is the end of a sentence."""
    return CheckpointError(f"checkpoint {str(folder)!r} is damaged: {what}; load another one")
