"""Loads the simulator into the process that ranks are copies of, where it is installed; no device is acquired."""

from importlib.util import find_spec

if find_spec("habana_frameworks"):
    import habana_frameworks.torch  # noqa: F401 - loaded is all that it must be
