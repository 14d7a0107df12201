"""The strategy of this example passes the conformance kit."""

import sys
from pathlib import Path

from dstrat.testing import StrategySuite

sys.path.insert(0, str(Path(__file__).parent))
import zero1  # noqa: F401 - registers the alias


class TestZero1(StrategySuite):
    """All standard tests."""

    alias = "zero1"
    world_sizes = (2,)
