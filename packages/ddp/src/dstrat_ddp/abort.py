"""Leaving a process group whose other members may be gone."""

from __future__ import annotations

import torch.distributed as dist

from dstrat.parallel.process_group import close_process_group


def abort_process_group() -> None:
    """Close the default process group without waiting for what is under way."""
    # Closing waits for NCCL's collectives, which never end when a rank is gone; other backends fail by themselves.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        abort()
    close_process_group()
