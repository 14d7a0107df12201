"""Which mode the bridge runs in."""

import os


def is_lazy() -> bool:
    return os.getenv("PT_HPU_LAZY_MODE", "1") != "0"
