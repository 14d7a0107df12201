"""Bagua's algorithms as a strategy for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_bagua.algorithm import Algorithm, Replica
    from dstrat_bagua.async_model_average import AsyncModelAverageAlgorithm
    from dstrat_bagua.buckets import Bucket
    from dstrat_bagua.bytegrad import ByteGradAlgorithm
    from dstrat_bagua.decentralized import DecentralizedAlgorithm
    from dstrat_bagua.gradient_allreduce import GradientAllReduceAlgorithm
    from dstrat_bagua.low_precision_decentralized import LowPrecisionDecentralizedAlgorithm
    from dstrat_bagua.q_adam import QAdamAlgorithm, QAdamOptimizer
    from dstrat_bagua.strategy import BaguaStrategy

__all__ = [
    "Algorithm",
    "AsyncModelAverageAlgorithm",
    "BaguaStrategy",
    "Bucket",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "GradientAllReduceAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "Replica",
]

_HOMES = {
    "Algorithm": "dstrat_bagua.algorithm",
    "AsyncModelAverageAlgorithm": "dstrat_bagua.async_model_average",
    "BaguaStrategy": "dstrat_bagua.strategy",
    "Bucket": "dstrat_bagua.buckets",
    "ByteGradAlgorithm": "dstrat_bagua.bytegrad",
    "DecentralizedAlgorithm": "dstrat_bagua.decentralized",
    "GradientAllReduceAlgorithm": "dstrat_bagua.gradient_allreduce",
    "LowPrecisionDecentralizedAlgorithm": "dstrat_bagua.low_precision_decentralized",
    "QAdamAlgorithm": "dstrat_bagua.q_adam",
    "QAdamOptimizer": "dstrat_bagua.q_adam",
    "Replica": "dstrat_bagua.algorithm",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
