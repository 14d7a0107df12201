"""The alias that FairScale serves passes the conformance kit, where FairScale is installed."""

from typing import ClassVar

import pytest

from dstrat.testing import StrategySuite

pytest.importorskip("fairscale", reason="needs fairscale")


class TestDDPSharded(StrategySuite):
    alias = "ddp_sharded"
    world_sizes = (1, 2)
    expected_failures: ClassVar = {
        "test_it_trains_in_each_precision_that_it_declares[16-mixed]": "FairScale's loss scale needs CUDA",
    }
