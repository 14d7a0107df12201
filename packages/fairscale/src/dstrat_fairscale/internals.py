"""FairScale's classes, imported without its warnings."""

from __future__ import annotations

import warnings

# FairScale's last release is of 2022: it imports what torch has deprecated since, and users cannot change that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
    from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
    from fairscale.optim import OSS
    from fairscale.optim.grad_scaler import ShardedGradScaler

__all__ = [
    "OSS",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "auto_wrap",
    "default_auto_wrap_policy",
    "enable_wrap",
]
