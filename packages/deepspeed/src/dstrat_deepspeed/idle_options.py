"""Validation of offloading options that would have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import ConflictError
from dstrat_deepspeed.options import changed

if TYPE_CHECKING:
    from dstrat_deepspeed.options import Options


def check_offloading(options: Options) -> None:
    """Check that no option of offloading would be ignored.

    Raises:
        ConflictError: One would, as nothing is offloaded so.
    """
    offload = options.offload
    of_optimizer = offload.offload_optimizer_device if offload.offload_optimizer else None
    of_parameters = offload.offload_params_device if offload.offload_parameters else None
    anything = of_optimizer or of_parameters
    in_files = "nvme" in (of_optimizer, of_parameters)
    needed = {
        "offload_optimizer_device": (of_optimizer, "offload_optimizer=True"),
        "offload_params_device": (of_parameters, "offload_parameters=True"),
        "optimizer_buffer_count": (of_optimizer == "nvme", "the optimizer offloaded to 'nvme'"),
        "params_buffer_count": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "params_buffer_size": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "max_in_cpu": (of_parameters == "nvme", "parameters offloaded to 'nvme'"),
        "nvme_path": (in_files, "offload_optimizer_device='nvme' or offload_params_device='nvme'"),
        "pin_memory": (anything, "offload_optimizer=True or offload_parameters=True"),
    }
    for name in changed(offload):
        has, what = needed.get(name, (True, ""))
        if not has:
            raise ConflictError(
                f"{name}={getattr(offload, name)!r} changes nothing without {what}: pass that too (sections of config= "
                "say all of it themselves), or leave it out"
            )
