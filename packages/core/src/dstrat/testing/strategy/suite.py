"""The suite for strategies."""

from __future__ import annotations

from dstrat.testing.strategy.checkpoints import Checkpoints
from dstrat.testing.strategy.collectives import Collectives
from dstrat.testing.strategy.evaluation import Evaluation
from dstrat.testing.strategy.gradients import Gradients
from dstrat.testing.strategy.life_cycle import LifeCycle
from dstrat.testing.strategy.records import Records
from dstrat.testing.strategy.sessions import Devices, Scenarios, Sessions


class StrategySuite(Records, LifeCycle, Collectives, Gradients, Scenarios, Evaluation, Checkpoints, Sessions, Devices):
    """Standard tests of a strategy.

    ::

        class TestMyStrategy(StrategySuite):
            alias = "my_strategy"

    Beside the alias a test class may declare what the record cannot say, see
    :class:`~dstrat.testing.strategy.base.StrategyTests`.  Ranks are copies of a warm process, so that hundreds of
    them cost less than a minute.
    """
