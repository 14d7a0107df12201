"""Checkpoint state of a module and optimizers that DeepSpeed shards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.whole_state import (
    agree_on,
    gather_state,
    name_parameters,
    number_parameters,
    scatter_module_state,
    scatter_optimizer_entries,
)
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.interfaces.state_dict import groups_misfit
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_deepspeed import internals
from dstrat_deepspeed.native_save import check_can_save_native, remove_native, save_native
from dstrat_deepspeed.optimizer_state import PartitionedState
from dstrat_deepspeed.partitions import partitions_of, shard_of_stage_3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import TrainerLike
    from dstrat_deepspeed.config import Configuration
    from dstrat_deepspeed.engine import Engine
    from dstrat_deepspeed.user_module import OutsideChanges


_logger = logging.getLogger(__name__)


class CheckpointedStrategy(ParallelStrategy):
    """A strategy whose state is in an engine of DeepSpeed: in flat partitions, some elements of each parameter.

    Each rank returns views of its elements under the names of the user's module, so that a checkpoint can move
    to any other strategy.
    """

    stage: int
    _configuration: Configuration
    _engine: Engine | None = None
    _group_names: list[list[str]] | None = None
    _state: PartitionedState | None = None
    _state_of: Engine | None = None
    _changes: OutsideChanges | None = None

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        self._group_names = None
        if len(self.optimizers) == 1:
            names = self._names()
            groups = self.optimizers[0].param_groups
            self._group_names = [[names[id(p)] for p in group["params"]] for group in groups]

    def module_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the module, of stage 3 on global rank 0 only; collective."""
        if self.stage < 3 or self._engine is None:
            return super().module_state_dict()
        return gather_state(self.sharded_module_state(), self)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole state that global rank 0 has; collective."""
        scatter_module_state(self, state, self.sharded_module_state(), strict=strict)
        self._take_weights()

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module, of stage 3 in this rank's shards of parameters."""
        self._accept_changes(moves=False)
        return sharded_state(self.module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of the optimizer on global rank 0, and an empty dict on the others; collective."""
        self._accept_changes(moves=False)
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            return super().optimizer_state(optimizer)
        whole = gather_state(partitioned.get(), self)
        return number_parameters(whole) if self.is_global_zero else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the whole state of an optimizer that global rank 0 has; collective."""
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            super().load_optimizer_state(optimizer, state)
            return
        names = partitioned.group_names
        agree_on(self, lambda: groups_misfit(optimizer, names, [group["params"] for group in state["param_groups"]]))
        named = name_parameters(state, names) if self.is_global_zero else {"state": {}, "param_groups": []}
        shards = partitioned.shards

        def shard(name: str, whole: Tensor) -> Tensor | FlatShard:
            like = shards.get(name)
            if like is None or not whole.dim() or whole.shape != like.shape:
                return whole.cpu()
            return FlatShard(local=like.taken_from(whole).clone(), start=like.start, shape=like.shape)

        entries = scatter_optimizer_entries(self, named["state"], shard)
        partitioned.load({"state": entries, "param_groups": self.broadcast(named["param_groups"])})
        self._after_loading()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer by the names of its parameters, in this rank's shards."""
        self._accept_changes(moves=False)
        partitioned = self._partitioned(optimizer)
        return super().sharded_optimizer_state(optimizer) if partitioned is None else partitioned.get()

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the tensors of the optimizer that a checkpoint is loaded into, also before its first step."""
        partitioned = self._partitioned(optimizer)
        return OptionalTensors() if partitioned is None else partitioned.template()

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the result of :meth:`sharded_optimizer_state`, or the same with whole tensors; collective.

        Raises:
            CheckpointError: It is the state of other parameters, or of another optimizer.
        """
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            super().load_sharded_optimizer_state(optimizer, state)
            return
        partitioned.load(state)
        self._after_loading()

    def rank_state(self) -> dict[str, Any]:
        """Return the gradients that this rank has accumulated, where they wait for a step."""
        if not self.saves_gradients:
            return {}
        gradients = accumulated_gradients(self._wrapped_optimizer)
        if gradients and self.is_global_zero:
            _logger.info(
                "the checkpoint is saved between the batches of one optimizer step: a run that continues it on %d "
                "ranks with stage %d has their gradients, others leave these batches out",
                self.world_size,
                self.stage,
            )
        return {"gradients": gradients, "stage": self.stage}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Let the next backward pass accumulate onto the gradients that were saved."""
        gradients = state.get("gradients", {})
        if self.saves_gradients and state.get("stage") == self.stage:
            put_back_gradients(self._wrapped_optimizer, gradients)
            if gradients and self._engine is not None:
                self._engine.expect_gradients()
        elif gradients and self.is_global_zero:
            _logger.warning(
                "the checkpoint has gradients of stage %s between the batches of one optimizer step: with stage %d "
                "these batches are left out",
                state.get("stage"),
                self.stage,
            )

    @property
    def saves_gradients(self) -> bool:  # type: ignore[override]  # not the same for all stages
        """Whether :meth:`rank_state` has the gradients that wait for a step."""
        return self.stage > 0 and self._engine is not None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a checkpoint, and DeepSpeed's own files beside it where ``save_native`` asks for them; collective."""
        options = self._configuration.options.checkpoints
        if not (options.save_native and self._engine is not None and self.optimizers):
            super().save_checkpoint(checkpoint, path)
            return
        check_can_save_native(path, self)
        super().save_checkpoint(checkpoint, path)
        exclude_frozen = options.exclude_frozen_parameters
        with self._engine.without_empty_groups():
            save_native(self._engine.engine, checkpoint, path, self, exclude_frozen=exclude_frozen)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, with the files that DeepSpeed has written beside it."""
        super().remove_checkpoint(path)
        if self._configuration.options.checkpoints.save_native and self.is_global_zero:
            remove_native(path)

    @property
    def _wrapped_optimizer(self) -> Any:
        """DeepSpeed's wrapper of the optimizer."""
        return None if self._engine is None else self._engine.engine.optimizer

    def _take_weights(self) -> None:
        if self._engine is not None and self.optimizers:
            partitioned = self._partitioned(self.optimizers[0])
            if partitioned is not None:
                partitioned.take_weights()
        self._after_loading()

    def _after_loading(self) -> None:
        gather_persistent(self._wrapped_optimizer)
        if self._changes is not None:
            self._changes.ignore()

    def _accept_changes(self, *, moves: bool = True) -> None:
        """Let the optimizer go on with weights that hooks have changed."""
        if self._changes is not None:
            self._changes.accept(moves=moves)

    def _names(self) -> dict[int, str]:
        # torch.compile puts layers into others of this name, which a checkpoint does not have.
        return {id(parameter): name.replace("_orig_mod.", "") for name, parameter in self.module.named_parameters()}

    def _partitioned(self, optimizer: Optimizer) -> PartitionedState | None:
        """Return the state of partitions; None where the optimizer has the parameters themselves."""
        if self._state is None or self._state_of is not self._engine:
            partitions = partitions_of(self._wrapped_optimizer, self._names())
            if partitions is None:
                return None
            self._state = PartitionedState(optimizer, partitions, self._group_names)
            self._state_of = self._engine
        return self._state


# The state of a module whose parameters stage 3 has split


def sharded_state(module: Module) -> dict[str, Any]:
    """Return the state of a module, with this rank's shards in place of parameters that are split."""
    state: dict[str, Any] = module.state_dict()
    shards: dict[int, FlatShard] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and hasattr(parameter, "ds_tensor"):
            if id(parameter) not in shards:
                shards[id(parameter)] = shard_of_stage_3(parameter)
            state[name] = shards[id(parameter)]
    return state


def gather_persistent(optimizer: Any) -> None:
    """Gather the small parameters that stage 3 keeps whole anew, after their shards have changed; collective."""
    persistent = getattr(optimizer, "persistent_parameters", None)
    if persistent:  # the methods of one are about all that are passed
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


# Gradients that wait for a step of the optimizer, where each stage accumulates them

_BY_PARAMETER = ("grad", "grad_accum")


def accumulated_gradients(optimizer: Any) -> dict[str, Any]:
    """Return this rank's gradients that wait for a step of stages 1 to 3, as it has them; empty where there are none.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
    """
    if hasattr(optimizer, "fp32_groups_has_gradients"):  # stage 1 with weights of 16 bits and gradients of 32
        computed = [list(group) for group in optimizer.fp32_groups_has_gradients]
        flat = list(optimizer.fp32_groups_gradients_flat)
        return {"flat": flat, "computed": computed} if any(map(any, computed)) else {}
    if hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3
        batches = internals.accumulated_batches(optimizer)
        return {"flat": optimizer.grad_partitions_flat_buffer, "batches": batches} if batches > 0 else {}
    gradients: dict[str, Any] = {
        key: {
            str(number): value
            for number, parameter in _parameters(optimizer)
            if (value := getattr(parameter, key, None)) is not None
        }
        for key in _BY_PARAMETER
    }
    gradients["all"] = {str(group): list(v) for group, v in optimizer.all_grad_tensors.items() if v is not None}
    gradients["flat"] = {
        str(group): value.flat_partition
        for group, value in optimizer.averaged_gradients.items()
        if getattr(value, "flat_partition", None) is not None
    }
    gradients["cpu"] = {str(number): value for number, value in internals.accumulated_on_cpu(optimizer).items()}
    present = {key: value for key, value in gradients.items() if value}
    return {**present, "batches": optimizer.micro_step_id} if present else {}


def put_back_gradients(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Let the next backward pass or step go on with the result of :func:`accumulated_gradients`.

    Args:
        optimizer: Of the same stage and number of ranks.
        saved: The gradients; empty where there were none.
    """
    if not saved:
        return
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        for buffer, value in zip(optimizer.fp32_groups_gradients_flat, saved["flat"], strict=True):
            buffer.copy_(value)
        optimizer.fp32_groups_has_gradients = [list(group) for group in saved["computed"]]
        return
    optimizer.micro_step_id = saved["batches"]
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        internals.put_back_flat_gradients(optimizer, saved["flat"])
        return
    parameters = {str(number): parameter for number, parameter in _parameters(optimizer)}
    for key in _BY_PARAMETER:
        for number, value in saved.get(key, {}).items():
            setattr(parameters[number], key, value.to(parameters[number].device))
    for group, values in saved.get("all", {}).items():
        device = optimizer.bit16_groups_flat[int(group)].device
        optimizer.all_grad_tensors[int(group)] = [value.to(device) for value in values]
    for group, value in saved.get("flat", {}).items():
        internals.put_back_partition(optimizer, int(group), value)
    for number, value in saved.get("cpu", {}).items():
        internals.put_back_on_cpu(optimizer, int(number), value)


def _parameters(optimizer: Any) -> Iterator[tuple[int, Any]]:
    for group in optimizer.bit16_groups:
        for parameter in group:
            yield optimizer.get_param_id(parameter), parameter
