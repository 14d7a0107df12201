"""Check of installed versions."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from dstrat.cli.diagnosis.finding import Finding
from dstrat.plugins.offer import owner_label

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.plugins.catalog import Catalog


def check_versions(catalog: Catalog) -> Iterator[Finding]:
    """Tell the versions of Python, torch and the distributions that offer components."""
    yield Finding(subject="python", text=f"{platform.python_version()} on {platform.platform()}")
    yield _torch()
    distributions = {owner_label(plugin.distribution, plugin.version) for plugin in catalog.plugins}
    yield Finding(subject="distributions", text=", ".join(sorted(distributions)))


def _torch() -> Finding:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - a torch that does not fit the machine raises many things
        text = f"cannot be imported ({type(error).__name__}: {error}): reinstall it"
        return Finding(subject="torch", text=text, state="problem")
    if not dist.is_available():
        text = f"{torch.__version__} without torch.distributed: only strategies of one process work"
        return Finding(subject="torch", text=text, state="note")
    tests = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, is_available in tests.items() if is_available()]
    return Finding(subject="torch", text=f"{torch.__version__}, backends {', '.join(backends) or 'none'}")
