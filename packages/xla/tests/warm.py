"""Loads torch_xla into the process that ranks are copies of, where it is installed; it does not start the runtime."""

from importlib.util import find_spec

if find_spec("torch_xla"):
    from dstrat_xla import runtime

    runtime.torch_xla()
    import dstrat_xla.spmd
    import dstrat_xla.strategy  # noqa: F401 - loaded is all that it must be
