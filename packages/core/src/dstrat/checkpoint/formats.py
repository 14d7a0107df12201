"""Detection of a checkpoint's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.paths import place
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.newest import is_portable
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError, DstratError

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO


def io_for(path: str | Path, own: CheckpointIO) -> CheckpointIO:
    """Return what handles a checkpoint: the run's own, unless that is one of ours and the checkpoint the other's.

    Raises:
        CheckpointError: The system refuses to look for such a file.
    """
    inner = own.checkpoint_io if isinstance(own, AsyncCheckpointIO) else own
    try:
        if type(inner) is TorchCheckpointIO and is_portable(place(path)):
            return PortableCheckpointIO()
        if type(inner) is PortableCheckpointIO and place(path).is_file() and not is_portable(place(path)):
            return TorchCheckpointIO()
    except OSError as error:
        if isinstance(error, DstratError):
            raise
        # Python takes most of these for "not there", but neither a name that is too long nor a folder without access.
        raise CheckpointError(
            f"cannot read checkpoint {str(path)!r}: {error.strerror or error}: give another path"
        ) from error
    return own
