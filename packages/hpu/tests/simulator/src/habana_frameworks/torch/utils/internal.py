"""Mode of the bridge, lazy or eager, frozen at import."""

import os

_LAZY = os.getenv("PT_HPU_LAZY_MODE", "0") != "0"


def is_lazy() -> bool:
    return _LAZY
