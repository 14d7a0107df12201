"""HPU graphs: modules whose forward and backward passes are captured once, and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import ConflictError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat_hpu import runtime
from dstrat_hpu.accelerator import HPUAccelerator

if TYPE_CHECKING:
    from torch.nn import Module

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class HPUGraphs(Callback):
    """Training with HPU graphs, through the vendor's ``ModuleCacher``, for the time of a fit.

    Each module's forward pass, and the backward pass through it, is captured for each shape of its inputs, and
    replayed afterwards: the host records no operations.  Evaluation runs as without.  The module must compute the
    same operations in each step, on the device alone, and return tensors; what it returned is overwritten in the
    next step.  What Python does in ``forward`` happens in the capture only; buffers that it changes change twice in
    that step.

    Args:
        *modules: Names of submodules, such as ``"encoder"``; none stands for the ``forward`` of the module itself.
        max_graphs: The most graphs of each module; inputs of further shapes are computed without.
        allow_unused_input: Whether inputs and parameters may take no part in the outputs.
        asynchronous: Whether a replay returns before it has been launched.
        disable_tensor_cache: Whether memory of intermediate results is released after each replay.

    Raises:
        ConflictError: In a fit on another accelerator, or with a strategy that shards parameters, whose collectives
            cannot be captured.
        RequestError: In a fit in eager mode, which has no HPU graphs, or without a submodule of that name.
    """

    def __init__(
        self,
        *modules: str,
        max_graphs: int = 10,
        allow_unused_input: bool = False,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
    ) -> None:
        self._names, self._max_graphs = modules, max_graphs
        # With gradient accumulation the first batch needs a graph of its own: its gradients are the memory of the
        # graph, which the next batch's replay would overwrite before they are added.
        self._options = {
            "have_grad_accumulation": True,
            "allow_unused_input": allow_unused_input,
            "asynchronous": asynchronous,
            "disable_tensor_cache": disable_tensor_cache,
        }
        self._wrapped: list[tuple[Module, set[str], Any]] = []

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy.accelerator, HPUAccelerator):
            raise ConflictError(
                f"HPUGraphs needs Gaudi, and the accelerator is {type(trainer.strategy.accelerator).__name__}: leave "
                "the callback out, or choose accelerator='hpu'"
            )
        if not runtime.is_lazy():
            raise RequestError(
                "HPUGraphs needs lazy mode, as eager mode has no HPU graphs: set PT_HPU_LAZY_MODE=1 before Python "
                "starts, or take torch.compile with backend='hpu_backend'"
            )
        if not trainer.strategy.replicates_state:
            raise ConflictError(
                f"HPUGraphs cannot capture modules that {type(trainer.strategy).__name__} shards, which communicate "
                "within their forward pass: choose hpu_parallel or hpu_single, or leave the callback out"
            )

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        for name in self._names or ("",):
            submodule = _find(module, name)
            before = dict(vars(submodule))  # the cacher has no way back: teardown removes what it adds
            runtime.hpu().ModuleCacher(self._max_graphs)(model=submodule, inplace=True, **self._options)
            added = vars(submodule).keys() - before.keys()
            self._wrapped.append((submodule, added, before.get("forward")))

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        for submodule, *_ in self._wrapped:
            # The cacher's first graph of an accumulation sets gradients, and its other adds to them.
            submodule.set_iteration_count(batch_idx % trainer.accumulate_grad_batches)  # type: ignore[operator]  # the vendor's

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # The graphs refer to the parameters' memory on the device, which the module is about to leave.
        for submodule, added, forward in self._wrapped:
            for name in added & vars(submodule).keys():
                delattr(submodule, name)
            if forward is not None:  # the user's, in place of which the cacher put its function
                vars(submodule)["forward"] = forward
        self._wrapped = []


def _find(module: Module, name: str) -> Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        possible = ", ".join(child for child, _ in module.named_modules() if child)
        raise RequestError(
            f"HPUGraphs({name!r}) names no submodule of {type(module).__name__}: choose among {possible}"
        ) from error
