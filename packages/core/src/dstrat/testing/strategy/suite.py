"""The suite for strategies."""

from __future__ import annotations

from dstrat.testing.strategy.records import Records


class StrategySuite(Records):
    """Standard tests of a strategy.

    ::

        class TestMyStrategy(StrategySuite):
            alias = "my_strategy"

    Beside the alias a test class may declare what the record cannot say, see
    :class:`~dstrat.testing.strategy.base.StrategyTests`.  Ranks are copies of a warm process, so that hundreds of
    them cost less than a minute.
    """
