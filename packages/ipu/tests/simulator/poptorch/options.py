"""Options, which are frozen when a model or a loader has taken them.

After graphcore/poptorch, python/options.py and python/_options_impl.py (``checkIsFrozen``, ``__setattr__``).
"""

from __future__ import annotations

import copy
import enum

import torch


class OutputMode(enum.IntEnum):
    """Which results of a call come back to the host (python/enums.py)."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(enum.IntEnum):
    """How gradients of micro-batches and replicas are reduced."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class ConnectionType(enum.IntEnum):
    """When IPUs are attached."""

    Always = 0
    OnDemand = 1
    Never = 2


class AutoStage(enum.IntEnum):
    """How blocks become stages."""

    SameAsIpu = 0
    AutoIncrement = 1


class Stage:
    """Blocks that run on one IPU."""

    def __init__(self, *block_ids):
        assert all(isinstance(block, str) for block in block_ids), "Block IDs are supposed to be strings"
        self.blocks, self._ipu = block_ids, None

    def ipu(self, ipu):
        self._ipu = ipu
        return self


class PipelinedExecution:
    """Stages that work on different micro-batches at the same time."""

    def __init__(self, *args):
        self.stages = [] if args and isinstance(args[0], AutoStage) else [_stage(arg) for arg in args]

    def ipu_of(self, user_id, ipu_id):
        for index, stage in enumerate(self.stages):
            if user_id in stage.blocks:
                return index if stage._ipu is None else stage._ipu
        if self.stages:
            raise AssertionError(f"Unknown Block '{user_id}'")
        assert ipu_id is not None, f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for {user_id}"
        return ipu_id


class ShardedExecution(PipelinedExecution):
    """Stages that wait for each other."""


def _stage(given):
    return given if isinstance(given, Stage) else Stage(*((given,) if isinstance(given, str) else given))


class _Group:
    """Options that belong together; unknown names and changes after freezing raise."""

    def __init__(self, **values):
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_is_frozen", False)

    def __getattr__(self, name):
        if name.startswith("_") or name not in self.__dict__.get("_values", {}):
            raise AttributeError(f"Invalid attribute {name}.")
        return self._values[name]

    def __setattr__(self, name, value):
        self.set(**{name: value})

    def exists(self, name):
        return name in self._values

    def set(self, **changes):
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")
        for name, value in changes.items():
            assert name in self._values, f"Invalid option {name}, valid options are {list(self._values)}"
            kind = type(self._values[name])
            assert isinstance(value, kind), f"Unexpected type {type(value)} for option {name}. Expected {kind}"
            self._values[name] = value
        return self

    def _freeze(self, state=True):
        object.__setattr__(self, "_is_frozen", state)


class _Training(_Group):
    def __init__(self):
        super().__init__(gradient_accumulation=1, reduction=ReductionType.Mean)

    def gradientAccumulation(self, count):
        return self.set(gradient_accumulation=count)

    def accumulationAndReplicationReductionType(self, reduction):
        return self.set(reduction=reduction)


class _Precision(_Group):
    def __init__(self):
        super().__init__(stochastic_rounding=False, partials="float")

    def enableStochasticRounding(self, enabled):
        return self.set(stochastic_rounding=enabled)

    def setPartialsType(self, dtype):
        return self.set(partials=str(dtype))


class _Popart(_Group):
    def __init__(self):
        super().__init__(options={})

    def set(self, *args, **changes):
        if not args:
            return super().set(**changes)
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")
        self.options[args[0]] = args[1]
        return self


class Options(_Group):
    """How a model is compiled and run."""

    def __init__(self):
        super().__init__(
            replication_factor=1,
            device_iterations=1,
            auto_round_num_ipus=False,
            output_mode=OutputMode.Default,
            output_return_period=1,
            connection_type=ConnectionType.Always,
            random_seed=-1,
            log_dir=".",
            model_name="",
            cache_path="",
        )
        for name, value in (("Training", _Training()), ("Precision", _Precision()), ("_Popart", _Popart())):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_execution_strategy", PipelinedExecution())

    def _freeze(self, state=True):
        for group in (self.Training, self.Precision, self._Popart):
            group._freeze(state)
        super()._freeze(state)

    def clone(self):
        cloned = copy.deepcopy(self)
        cloned._freeze(False)
        return cloned

    def __deepcopy__(self, memo):
        cloned = Options()
        for mine, copied in ((self, cloned), (self.Training, cloned.Training), (self.Precision, cloned.Precision)):
            copied._values.update(copy.deepcopy(mine._values, memo))
        cloned._Popart._values.update(copy.deepcopy(self._Popart._values, memo))
        object.__setattr__(cloned, "_execution_strategy", self._execution_strategy)
        return cloned

    def exists(self, name):
        return super().exists(name) and not (name == "random_seed" and self.random_seed < 0)

    def toDict(self):
        return dict(self._values) | {"gradient_accumulation": self.Training.gradient_accumulation}

    def defaultOutputMode(self):
        return self.output_mode is OutputMode.Default

    def deviceIterations(self, count):
        return self.set(device_iterations=count)

    def replicationFactor(self, count):
        return self.set(replication_factor=count)

    def autoRoundNumIPUs(self, enabled=True):
        return self.set(auto_round_num_ipus=enabled)

    def outputMode(self, mode, output_return_period=None):
        assert isinstance(mode, OutputMode)
        return self.set(output_mode=mode, output_return_period=output_return_period or 1)

    def connectionType(self, kind):
        return self.set(connection_type=kind)

    def randomSeed(self, seed):
        torch.manual_seed(seed)  # as the vendor's does
        return self.set(random_seed=seed)

    def setExecutionStrategy(self, strategy):
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")
        assert isinstance(strategy, PipelinedExecution)
        object.__setattr__(self, "_execution_strategy", strategy)
        return self

    def logDir(self, path):
        return self.set(log_dir=path)

    def modelName(self, name):
        return self.set(model_name=name)

    def enableExecutableCaching(self, path):
        return self.set(cache_path=path)

    def showCompilationProgressBar(self, show=True):
        return self
