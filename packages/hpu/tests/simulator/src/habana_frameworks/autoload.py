"""Autoload entry point, which torch calls when it is imported."""

import os


def autoload() -> None:
    enabled = os.getenv("PT_HPU_AUTOLOAD", "-1")
    if enabled == "1" or (enabled != "0" and os.getenv("PT_HPU_LAZY_MODE", "0") != "1"):
        import habana_frameworks.torch  # noqa: F401 - loaded is all that it must be
