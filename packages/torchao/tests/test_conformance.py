"""The precisions pass the conformance kit."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, PrecisionSuite

pytest.importorskip("torchao", reason="torchao is not installed")


class TestPlugin(PluginSuite):
    distribution = "dstrat-torchao"


def every_layer(layer, name):
    return True


class TestFloat8(PrecisionSuite):
    alias = "float8"
    options: ClassVar = {"emulate": True, "layers": every_layer}


class TestFloat8Rowwise(PrecisionSuite):
    alias = "float8-rowwise"
    options: ClassVar = {"emulate": True, "layers": every_layer}


class TestFloat8RowwiseWithExactWeightGradients(PrecisionSuite):
    alias = "float8-rowwise-gw-hp"
    options: ClassVar = {"emulate": True, "layers": every_layer}


class TestInt8Weights(PrecisionSuite):
    alias = "int8-weights"


class TestNF4Weights(PrecisionSuite):
    alias = "nf4-weights"
