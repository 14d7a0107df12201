"""Checkpoint state of a module and optimizers that DeepSpeed shards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.interfaces.state_dict import canonical_name, canonical_parameters, named_weights
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_deepspeed import internals
from dstrat_deepspeed.native_save import check_can_save_native, remove_native, save_native
from dstrat_deepspeed.nvme import parameters_in_files
from dstrat_deepspeed.optimizer_state import PartitionedState, partitions_of, shard_of_stage_3
from dstrat_deepspeed.user_module import empty_parameters_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import TrainerLike
    from dstrat_deepspeed.config import Configuration
    from dstrat_deepspeed.engine import Engine
    from dstrat_deepspeed.user_module import OutsideChanges


_logger = logging.getLogger(__name__)


class CheckpointedStrategy(ParallelStrategy):
    """A strategy with its state in DeepSpeed's engine, in flat partitions of the parameters.

    Each rank saves views of its elements under the names of the user's module, so that any other strategy can load the
    checkpoint.
    """

    stage: int
    _configuration: Configuration
    _engine: Engine | None = None
    _group_names: list[list[str]] | None = None
    _state: PartitionedState | None = None
    _changes: OutsideChanges | None = None

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        self._group_names = None
        if len(self.optimizers) == 1:
            names = self._names()
            groups = self.optimizers[0].param_groups
            self._group_names = [[names[id(p)] for p in group["params"]] for group in groups]

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(state, strict)
        if self._engine is not None and self.optimizers:
            partitioned = self._partitioned(self.optimizers[0])
            if partitioned is not None:
                partitioned.sync_weights()
        self._after_loading()

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module, with this rank's shards of stage 3's parameters."""
        self._accept_changes(moves=False)
        return sharded_state(self.module)

    def local_weights(self) -> dict[str, Any]:
        """Return the parameters, of stage 3 this rank's shards, and the buffers, by name.

        Raises:
            ConflictError: Parameters are in files.
        """
        if parameters_in_files(self.module):
            raise ConflictError(
                "parameters that are offloaded to 'nvme' are in files, which are not written between steps; offload "
                "them to 'cpu'"
            )
        self._accept_changes(moves=False)
        return with_shards(self.module, named_weights(self.module))

    def accept_local_weights(self) -> None:
        """Gather changed shards anew where stage 3 keeps parameters gathered; master weights stay."""
        self._after_loading()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer by the names of its parameters, in this rank's shards."""
        self._accept_changes(moves=False)
        partitioned = self._partitioned(optimizer)
        return super().sharded_optimizer_state(optimizer) if partitioned is None else partitioned.get()

    def parameter_names(self, optimizer: Optimizer) -> Sequence[Sequence[str]]:
        """Return the names of the parameters in each group of the user's optimizer, which DeepSpeed has joined."""
        partitioned = self._partitioned(optimizer)
        return super().parameter_names(optimizer) if partitioned is None else partitioned.group_names

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's tensors to load a checkpoint into, also before the optimizer's first step."""
        partitioned = self._partitioned(optimizer)
        return OptionalTensors() if partitioned is None else partitioned.template()

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the result of :meth:`sharded_optimizer_state`, or the same with full tensors; collective.

        Raises:
            CheckpointError: The state is of other parameters, or of another optimizer.
        """
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            super().load_sharded_optimizer_state(optimizer, state)
            return
        partitioned.load(state)
        self._after_loading()

    def rank_state(self) -> dict[str, Any]:
        """Return the gradients that this rank has accumulated since the last step."""
        if not self.saves_gradients:
            return {}
        gradients = internals.accumulated_gradients(self._wrapped_optimizer)
        if gradients and self.is_global_zero:
            _logger.info(
                "the checkpoint is saved between the batches of one optimizer step: a run that continues it on %d "
                "ranks with stage %d has their gradients, others leave these batches out",
                self.world_size,
                self.stage,
            )
        return {"gradients": gradients, "stage": self.stage}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load accumulated gradients, to which the next backward pass adds."""
        gradients = state.get("gradients", {})
        if self.takes_gradients(state):
            internals.restore_gradients(self._wrapped_optimizer, gradients)
            if gradients and self._engine is not None:
                self._engine.expect_gradients()
        elif gradients and self.is_global_zero:
            _logger.warning(
                "the checkpoint has gradients of stage %s between the batches of one optimizer step: with stage %d "
                "these batches are left out",
                state.get("stage"),
                self.stage,
            )

    def takes_gradients(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state is of the same stage, and this one keeps gradients of its own."""
        return self.saves_gradients and bool(state.get("stage") == self.stage)

    @property
    def saves_gradients(self) -> bool:  # type: ignore[override]  # not the same for all stages
        """Whether :meth:`rank_state` has the gradients accumulated since the last step."""
        return self.stage > 0 and self._engine is not None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a checkpoint, and with ``save_native`` DeepSpeed's own files beside it; collective."""
        options = self._configuration.options.checkpoints
        if not (options.save_native and self._engine is not None and self.optimizers):
            super().save_checkpoint(checkpoint, path)
            return
        check_can_save_native(path)  # before the checkpoint is written, not after
        super().save_checkpoint(checkpoint, path)
        exclude_frozen = options.exclude_frozen_parameters
        with self._engine.without_empty_groups():
            save_native(self._engine.engine, checkpoint, path, self, exclude_frozen=exclude_frozen)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, with DeepSpeed's files beside it."""
        super().remove_checkpoint(path)
        if self._configuration.options.checkpoints.save_native and self.is_global_zero:
            remove_native(path)

    @property
    def _wrapped_optimizer(self) -> Any:
        """DeepSpeed's wrapper of the optimizer."""
        return None if self._engine is None else self._engine.engine.optimizer

    def _after_loading(self) -> None:
        if self._changes is None:
            drop_gathered(self.module, self._wrapped_optimizer)
            return
        with self._changes.replacing_gathered():  # loading has changed the weights: not a change by a hook
            drop_gathered(self.module, self._wrapped_optimizer)
        self._changes.ignore()

    def _accept_changes(self, *, moves: bool = True) -> None:
        """Copy weights that hooks have changed to the optimizer's."""
        if self._changes is not None:
            self._changes.accept(moves=moves)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in canonical_parameters(self.module).items()}

    def _partitioned(self, optimizer: Optimizer) -> PartitionedState | None:
        """Return the optimizer's state in partitions; None if the optimizer has the parameters themselves."""
        if self._state is None:
            partitions = partitions_of(self._wrapped_optimizer, self._names())
            if partitions is None:
                return None
            self._state = PartitionedState(optimizer, partitions, self._group_names)
        return self._state


# The state of a module whose parameters stage 3 has sharded


def sharded_state(module: Module) -> dict[str, Any]:
    """Return the state of a module, with this rank's shards of parameters that stage 3 has sharded."""
    with empty_parameters_allowed():
        state = module.state_dict()
    return with_shards(module, state)


def with_shards(module: Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in which this rank's shards replace the parameters that stage 3 has sharded."""
    shards: dict[int, FlatShard] = {}  # by parameter: tied parameters have one shard object, and are saved once
    parameters = named_weights(module)
    for name in state:
        parameter = parameters.get(canonical_name(name))
        if hasattr(parameter, "ds_tensor"):
            if id(parameter) not in shards:
                shards[id(parameter)] = shard_of_stage_3(parameter)
            state[name] = shards[id(parameter)]
    return state


def drop_gathered(module: Module, optimizer: Any) -> None:
    """Replace what stage 3 has gathered by the values of shards that have changed; collective.

    These are persistent parameters, small ones that are not partitioned after their use, and ZeRO++'s second shards.
    """
    persistent = getattr(optimizer, "persistent_parameters", None)
    if persistent:  # each parameter's methods act on all parameters that are passed
        persistent[0].partition(persistent)
    for parameter in module.parameters():  # after the partition, which makes second shards of the gathered values
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None
    if persistent:
        persistent[0].all_gather(persistent)
