"""Loads Colossal-AI, whose import takes ten seconds, into the process that ranks are copies of."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

if find_spec("colossalai") and find_spec("dstrat_colossalai"):
    if simulator := os.environ.get("DSTRAT_TEST_HPU_SIMULATOR"):
        # Before: Colossal-AI's import lets torch look for accelerators, which it does once in a process.  Without the
        # path, the simulator's metadata is not found, so that it counts as not installed.
        sys.path.insert(0, simulator)
        import_module("habana_frameworks.torch")
        sys.path.remove(simulator)
    import_module("dstrat_colossalai.strategy")
