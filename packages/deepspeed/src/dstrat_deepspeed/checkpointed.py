"""Checkpoint state of a strategy around an engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.checkpoint_io import OptionalTensors
from dstrat.interfaces.fitting import groups_misfit, misfit
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_deepspeed.gradients import put_back, waiting_gradients
from dstrat_deepspeed.module_state import gather_persistent, sharded_state
from dstrat_deepspeed.native_save import check_can_save_native, remove_native, save_native
from dstrat_deepspeed.partitions import partitions_of
from dstrat_deepspeed.state import PartitionedState
from dstrat_deepspeed.whole_state import (
    agree_on,
    by_names,
    by_numbers,
    deal_out,
    gathered,
    told_by_rank_0,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from dstrat.interfaces.parts import TrainerLike
    from dstrat_deepspeed.changes import OutsideChanges
    from dstrat_deepspeed.configuration import Configuration
    from dstrat_deepspeed.engine import Engine


_logger = logging.getLogger(__name__)


class CheckpointedStrategy(ParallelStrategy):
    """A strategy whose state is in an engine of DeepSpeed: in flat partitions, some elements of each parameter.

    Each rank hands out views of its own elements under the names of the user's module, so that a checkpoint can move
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
        whole: dict[str, Any] = gathered(self.sharded_module_state(), self)
        return whole if self.is_global_zero else {}

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole state that global rank 0 has; collective."""
        targets = self.sharded_module_state()
        agree_on(self, lambda: misfit(self.module, targets, state, strict=strict))
        rest = deal_out(targets, state, self)
        if rest:
            self.module.load_state_dict(rest, strict=False)
        self._take_weights()

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the state of the module under its own names, of stage 3 in this rank's elements of each parameter."""
        self._accept_changes(moves=False)
        return sharded_state(self.module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of the optimizer on global rank 0, and an empty dict on the others; collective."""
        self._accept_changes(moves=False)
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            return super().optimizer_state(optimizer)
        whole = gathered(partitioned.get(), self)
        return by_numbers(whole, partitioned.group_names) if self.is_global_zero else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the whole state of an optimizer that global rank 0 has; collective."""
        partitioned = self._partitioned(optimizer)
        if partitioned is None:
            super().load_optimizer_state(optimizer, state)
            return
        names = partitioned.group_names
        agree_on(self, lambda: groups_misfit(optimizer, names, [group["params"] for group in state["param_groups"]]))
        named = by_names(state, names) if self.is_global_zero else {"state": {}, "param_groups": []}
        entries = told_by_rank_0(named["state"], partitioned.parts, self)
        partitioned.load({"state": entries, "param_groups": self.broadcast(named["param_groups"])})
        self._after_loading()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer by the names of its parameters, each rank its own elements."""
        self._accept_changes(moves=False)
        partitioned = self._partitioned(optimizer)
        return super().sharded_optimizer_state(optimizer) if partitioned is None else partitioned.get()

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the tensors of the optimizer that a checkpoint is loaded into, also before its first step."""
        partitioned = self._partitioned(optimizer)
        return OptionalTensors() if partitioned is None else partitioned.template()

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_optimizer_state` returned, or the same with whole tensors; collective.

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
        gradients = waiting_gradients(self._ready_optimizer)
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
            put_back(self._ready_optimizer, gradients)
            if gradients and self._engine is not None:
                self._engine.has_put_back()
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
    def _ready_optimizer(self) -> Any:
        """What DeepSpeed has made of the optimizer."""
        return None if self._engine is None else self._engine.engine.optimizer

    def _take_weights(self) -> None:
        if self._engine is not None and self.optimizers:
            partitioned = self._partitioned(self.optimizers[0])
            if partitioned is not None:
                partitioned.take_weights()
        self._after_loading()

    def _after_loading(self) -> None:
        gather_persistent(self._ready_optimizer)
        if self._changes is not None:
            self._changes.ignore()

    def _accept_changes(self, *, moves: bool = True) -> None:
        """Let the optimizer go on with weights that hooks have changed."""
        if self._changes is not None:
            self._changes.accept(moves=moves)

    def _take_first_state(self) -> None:
        """Give the partitions the state that the optimizer had of parameters, such as Adagrad's constructor makes."""
        for optimizer in self.optimizers:
            partitioned, names = self._partitioned(optimizer), self._names()
            if partitioned is not None:
                stepped = [parameter for parameter in self.module.parameters() if parameter in optimizer.state]
                partitioned.begin_with({names[id(p)]: optimizer.state.pop(p) for p in stepped})

    def _names(self) -> dict[int, str]:
        return {id(parameter): name.replace("_orig_mod.", "") for name, parameter in self.module.named_parameters()}

    def _partitioned(self, optimizer: Optimizer) -> PartitionedState | None:
        """Return the state of partitions; None where the optimizer has the parameters themselves."""
        if self._state is None or self._state_of is not self._engine:
            wrapped = self._ready_optimizer
            partitions = partitions_of(wrapped, self._names())
            if partitions is None:
                return None
            self._state = PartitionedState(optimizer, partitions, self._group_names)
            self._state_of = self._engine
        return self._state
