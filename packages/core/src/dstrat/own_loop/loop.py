"""OwnLoop: a strategy with a module, optimizers and loaders, for a hand-written training loop."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import Module

from dstrat.data.random_state import RandomState
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.state_dict import uncompiled_names
from dstrat.interfaces.strategy import Strategy
from dstrat.own_loop import checkpoint
from dstrat.own_loop.loaders import EvaluationLoader, TrainingLoader
from dstrat.own_loop.steps import FunctionSteps, Settings, Steps
from dstrat.own_loop.values import as_loggers, collect, log_metrics, open_loggers
from dstrat.parallel.layers import restored_modes
from dstrat.parallel.metric_states import states_gathered_by
from dstrat.parallel.separate_modules import SeparateModules
from dstrat.parallel.shards import full_value
from dstrat.resolve import Request, resolve_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.training.loggers.logger import Logger


T = TypeVar("T")


class OwnLoop:
    """A strategy for a hand-written training loop: launches it, and sets up the module, optimizers and loaders.

    The launched function gets the loop as its first argument::

        def train(loop, epochs):
            net = Net()
            loop.setup(net, lambda net: torch.optim.AdamW(net.parameters()))
            loader = loop.training_loader(DataLoader(data, batch_size=32, shuffle=True))
            while loader.epoch < epochs:
                for x, y in loader:
                    loss = loop.compute(net.loss, x, y)
                    loop.backward(loss)
                    loop.step()


        OwnLoop(dstrat.build(strategy="ddp", devices=2)).launch(train, epochs=3)

    Further operations are methods of ``loop.strategy``: ``clip_gradients``, ``unscale_gradients`` ...

    Args:
        strategy: The result of :func:`dstrat.build`.
        loggers: One or several loggers, to which :meth:`log` writes.

    Attributes:
        strategy: The strategy.
        loggers: The loggers.
    """

    def __init__(self, strategy: Strategy, loggers: Logger | Iterable[Logger] | None = None) -> None:
        if not isinstance(strategy, Strategy):
            raise MisuseError(
                f"OwnLoop needs a Strategy, not {strategy!r}: OwnLoop(dstrat.build(strategy={strategy!r}))"
            )
        self.strategy = strategy
        self.loggers = as_loggers(loggers)
        self._steps: Steps | None = None
        self._loaders: list[TrainingLoader] = []
        self._evaluated: list[weakref.ref[EvaluationLoader]] = []
        self._contexts = ExitStack()  # from the setup to the end
        self._is_launched = False

    # Launching

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``function(loop, *args, **kwargs)`` in every process of the job and wait for all of them.

        Afterwards, even after an error, communication is closed and all processes have ended; a failing rank ends the
        others.

        Returns:
            The function's result in this process, or that of global rank 0 if the function did not run here.

        Raises:
            RankFailedError: A rank failed; the error has its number and its traceback.
        """
        if self._is_launched:
            raise MisuseError("launch was called in a function that is launched already: call it after that has ended")
        launcher = self.strategy.launcher
        if launcher is None:
            return self._run(None, function, args, kwargs)
        # The first random numbers in the ranks are those that would follow here, as if the loop ran in this process.
        random_state = None if launcher.runs_here else RandomState.capture()
        result: T = launcher.launch(self._run, random_state, function, args, kwargs)
        return result

    def _run(
        self, random_state: RandomState | None, function: Callable[..., T], args: Any, kwargs: Mapping[str, Any]
    ) -> T:
        """Call the function in this process, while communication is open."""
        if random_state is not None:
            random_state.restore_in_new_process()
        self._is_launched = True
        with communicating(self.strategy, self._end), open_loggers(self.loggers, self.strategy):
            return function(self, *args, **kwargs)

    def _end(self) -> None:
        self._is_launched = False
        self._steps, self._loaders, self._evaluated = None, [], []
        self._contexts.close()
        self.strategy.teardown()

    # Setup

    def setup(
        self,
        module: Module | Sequence[Module] | Mapping[str, Module],
        make_optimizers: Callable[..., Any] | None = None,
        *,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm = "norm",
        sync_batchnorm: bool = False,
    ) -> None:
        """Set up a module with the strategy (precision, device, wrapping or sharding), and make its optimizers.

        Args:
            module: Any ``nn.Module``; its type and the names of its parameters do not change.  Several modules, as of a
                GAN, are a list, or a dict whose keys are their names in checkpoints.
            make_optimizers: A function of the module, called when the module is on its device.  It returns an
                optimizer, or any result that ``configure_optimizers`` of a module may have.  Several modules are as
                many arguments, in their order.  None if the module is only evaluated.
            accumulate_grad_batches: Number of batches whose gradients make up one optimizer step.
            gradient_clip_val: Maximal norm or value of gradients, to which :meth:`step` clips them; None and 0 do not
                clip.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``.
            sync_batchnorm: Whether batch-norm layers synchronize their statistics between all processes.
        """
        self._check_launched("setup")
        if self._steps is not None:
            raise MisuseError("setup was called twice: pass all modules at once, loop.setup([one, other], ...)")
        settings = Settings(
            strategy=self.strategy,
            make_optimizers=make_optimizers,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
        )
        strategy = self.strategy
        strategy.connect(_as_single_module(module))
        self._contexts.enter_context(uncompiled_names(strategy.module))
        if sync_batchnorm:
            strategy.synchronize_batchnorm()
        strategy.step_methods = FunctionSteps
        self._steps = Steps(settings)
        strategy.setup(settings)
        # Not at the launch: the function may import torchmetrics.
        self._contexts.enter_context(states_gathered_by(strategy))
        self._steps.begin()
        if settings.is_fitting:
            strategy.check_set_up()
        if accumulate_grad_batches > 1 and len(strategy.optimizers) > 1:
            raise ConflictError(
                f"accumulate_grad_batches={accumulate_grad_batches} is for a single optimizer, and there are "
                f"{len(strategy.optimizers)}: leave it out"
            )

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, after :meth:`setup`."""
        return self.strategy.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The learning-rate schedulers of the optimizers; the user's loop steps them, and checkpoints include them."""
        return [config.scheduler for config in self.strategy.lr_schedulers]

    def training_loader(self, loader: Any, *, distribute: bool = True) -> TrainingLoader:
        """Return this rank's shard of a loader, on its device; checkpoints include the position in it.

        Args:
            loader: A DataLoader or another iterable of batches, of the batch size of one process.
            distribute: Whether to shard the data between ranks; False if the loader has only this rank's shard.
        """
        self._check_launched("training_loader")
        self._loaders.append(TrainingLoader(loader, self.strategy, distribute=distribute))
        return self._loaders[-1]

    def evaluation_loader(self, loader: Any, *, distribute: bool = True) -> EvaluationLoader:
        """Return this rank's shard of a loader, on its device; in the whole job each sample is read once.

        Args:
            loader: A DataLoader or another iterable of batches.
            distribute: Whether to shard the data between ranks; False if the loader has only this rank's shard.
        """
        self._check_launched("evaluation_loader")
        prepared = EvaluationLoader(loader, self.strategy, distribute=distribute)
        self._evaluated.append(weakref.ref(prepared))  # weak, since a loop may make one for each epoch
        return prepared

    @property
    def _evaluation_loaders(self) -> list[EvaluationLoader]:
        """The evaluation loaders that still exist, in the order of their creation."""
        return [loader for reference in self._evaluated if (loader := reference()) is not None]

    # Steps

    def compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the module in the strategy's wrapper and precision, and return its result.

        With gradients enabled it is a training step, whose loss is for :meth:`backward`; otherwise an evaluation step.

        With stages (``"mesh(pp=2)"``) a training step computes the loss of the module's ``configure_pipeline`` for a
        batch, which the other positional arguments are, and its gradients; the function is not called.  The result is
        that loss, or a pair of it and its weight if the pipeline has one, as a function for weights of :meth:`backward`
        returns.  Pass it to :meth:`backward` unchanged; without that call the next training step clears the gradients.

        Args:
            function: The module itself, one of its methods, or any function that calls them; of several modules, one
                module, a method of one, or a function that calls several.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.
        """
        try:
            return self._set_up("compute").compute(function, *args, **kwargs)
        except AttributeError as error:
            # A strategy of the user that overrides a step as for the Trainer, whose modules have one.
            if error.name not in ("training_step", "validation_step") or error.obj is not self.strategy.module:
                raise
            raise MisuseError(
                f"{type(self.strategy).__name__} calls self.module.{error.name}, and the module of an own loop has no "
                f"such method: call super().{error.name}(*args, **kwargs), or override run_step instead"
            ) from error

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Compute the gradients of a loss (a scalar tensor), divided by the number of accumulated batches.

        With several optimizers, gradients that no optimizer has used since the last step are cleared first: the
        gradients of a loss are for the optimizer steps before the next loss.

        With weights the gradient of an optimizer step is that of ``sum(weight * loss) / sum(weight)``, over all
        accumulated batches of all processes: exactly that of one process with all of their samples.  The total is
        known after the last batch only, so gradients are scaled once in :meth:`step`, before they are clipped, by a
        factor that processes reduce on the device.

        Args:
            loss: The mean loss of the batch.
            weight: The number of labels or samples that it is the mean of: a number or a tensor with one element, which
                stays on its device; 0 for a batch without any.  Pass it for every batch in every process, or for none.

        Raises:
            MisuseError: Other processes or batches have a weight and this one has none, or the reverse.
            ConflictError: The strategy cannot weigh losses.
        """
        self._set_up("backward").backward(loss, weight)

    def step(self, optimizer: Optimizer | None = None, closure: Callable[[], Any] | None = None) -> bool:
        """Clip the gradients, step the optimizer and clear the gradients, once per ``accumulate_grad_batches`` calls.

        Args:
            optimizer: The optimizer to step; None for the only one.
            closure: For optimizers that compute the loss within their step, such as LBFGS and those of sharpness-aware
                minimization: a function that clears gradients, calls :meth:`compute` and :meth:`backward`, and returns
                the loss.

        Returns:
            Whether the optimizer stepped: False until gradients of ``accumulate_grad_batches`` batches are accumulated.
        """
        return self._set_up("step").step(optimizer, closure)

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps since :meth:`setup`, including those before the checkpoint that was loaded."""
        return 0 if self._steps is None else self._steps.num_done

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """In this context the module is in evaluation mode, without gradients; all processes enter it."""
        self._set_up("evaluation")
        module: Module = self.strategy.module
        with restored_modes(module):
            module.eval()
            with torch.no_grad(), self.strategy.evaluation_context():
                yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """In this context operations run in the strategy's precision, as in :meth:`compute`."""
        self._set_up("autocast")
        with self.strategy.precision_plugin.forward_context():
            yield

    # Processes

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.strategy.root_device

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.strategy.is_global_zero

    def to_device(self, batch: T) -> T:
        """Return a batch, or any collection with tensors, on the device of this process."""
        return self.strategy.batch_to_device(batch)  # type: ignore[no-any-return]  # of the same types

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has called it."""
        self.strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of the rank ``src`` in every process."""
        return self.strategy.broadcast(obj, src)

    def all_reduce(self, data: Any, group: Any | None = None, reduce_op: str | Any | None = "mean") -> Any:
        """Return a collection with each of its tensors and numbers reduced over all processes, as tensors.

        Args:
            data: A tensor, a number, or dicts, lists, tuples and dataclasses of them; the same structure everywhere.
                Of a DTensor each process has the full value.
            group: The process group; None is all processes.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, or torch's.
        """
        return collect(data, self.device, lambda tensor: self.strategy.reduce(full_value(tensor), group, reduce_op))

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return a collection in which each tensor and number is replaced by the stacked values of all processes.

        Processes that share a batch, as those that divide a model do, count once, so that each sample comes once.

        Args:
            data: As in :meth:`all_reduce`, DTensors without ``sync_grads`` only; a tensor of shape ``(*shape)`` becomes
                one of ``(world_size, *shape)``, or with as many rows as there are different batches.
            group: The process group, of which all processes count; None is all batches.
            sync_grads: Whether the result is differentiable.
        """

        def gather(tensor: Tensor) -> Tensor:
            return self.strategy.all_gather(tensor if sync_grads else full_value(tensor), group, sync_grads)

        return collect(data, self.device, gather)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let rank 0 run the block before all others, such as for a download; every process enters it.

        The others wait at most for the strategy's timeout.

        Args:
            local: Whether local rank 0 of each machine runs it first, for machines without a shared file system.
        """
        self._check_launched("rank_zero_first")
        is_first = (self.local_rank if local else self.global_rank) == 0
        if not is_first:
            self.strategy.barrier("rank_zero_first")
        yield  # an error on rank 0 ends the job, so that no rank waits
        if is_first:
            self.strategy.barrier("rank_zero_first")

    # Output

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in the first process of each machine, and do nothing in the others."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Write a value to the loggers, as :meth:`log_dict` does."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values of rank 0 to the loggers; values of all processes must be reduced before.

        Args:
            metrics: Numbers, or tensors of one element, by name.  Of a DTensor, such as a norm of a sharded parameter,
                it is the full value, for which all processes of its mesh must call this method.
            step: Number of the step; None is :attr:`steps_done`.
        """
        self._check_launched("log")
        if not self.loggers:
            raise MisuseError("log was called without a logger: OwnLoop(strategy, loggers=CSVLogger())")
        values = {name: full_value(value) for name, value in metrics.items()}
        if self.is_global_zero:
            log_metrics(self.loggers, values, self.steps_done if step is None else step)

    # State

    def save_checkpoint(self, path: str | Path, state: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint, which any strategy can load with any world size; every process calls it.

        It contains the states of module, optimizers, schedulers and precision, the position in each training loader,
        and the random state.

        Args:
            path: The path.  A checkpoint of another run that is there is moved beside it, which is logged; one of this
                process is replaced.
            state: Further state of the loop: plain values and tensors, the same in every process.
        """
        steps = self._set_up("save_checkpoint")
        steps.check_no_pending()
        saved = {"steps_done": steps.num_done, "own": dict(state or {})}
        checkpoint.save(self.strategy, path, saved, self._loaders, self._evaluation_loaders)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Restore a checkpoint, and return the further state that was saved with it; every process calls it.

        Call it after :meth:`setup` and :meth:`training_loader`; accumulated gradients are cleared.  With the same
        strategy and world size the loop continues bit for bit.  Otherwise the data continues at the same part of
        the epoch, and the random state is not restored.

        Raises:
            CheckpointError: The checkpoint cannot be read, or is not one of this loop's module and loaders.
        """
        steps = self._set_up("load_checkpoint")
        state = checkpoint.load(self.strategy, path, self._loaders, self._evaluation_loaders)
        steps.resume_after(state["steps_done"])
        user_state: dict[str, Any] = state["own"]
        return user_state

    # Helpers

    def _check_launched(self, name: str) -> None:
        if not self._is_launched:
            raise MisuseError(f"{name} works in each process of the job: call it in the function that launch runs")

    def _set_up(self, name: str) -> Steps:
        self._check_launched(name)
        if self._steps is None:
            raise MisuseError(f"{name} was called before setup: call loop.setup(module, make_optimizers) first")
        return self._steps


def _as_single_module(module: Any) -> Module:
    """Return the module for the strategy: several are combined into one."""
    if isinstance(module, Module):
        return module
    if isinstance(module, Mapping):
        return SeparateModules(module)
    if isinstance(module, list | tuple):
        return SeparateModules({str(index): one for index, one in enumerate(module)})
    raise MisuseError(f"setup got {module!r}: pass a torch.nn.Module, or a list or dict of them")


# Communication around a hand-written loop


@contextmanager
def communicating(strategy: Strategy, end: Callable[[], None]) -> Iterator[None]:
    """Open communication; at the end tear down and close it; after an error abort it, so that no rank waits.

    Args:
        strategy: The strategy, before its setup.
        end: Tears the strategy down.
    """
    from dstrat.launch.progress import watched_for_hangs  # imported here, since only runs need it

    try:
        with watched_for_hangs(strategy):
            strategy.setup_environment()
            yield
            strategy.finish_training()
            strategy.barrier("end")  # rank 0 ends last, since others may still need it
    except BaseException as error:
        from dstrat.launch.rank import clean_up_after  # imported here, since only failing runs need it

        clean_up_after(error, strategy, [partial(strategy.on_exception, error), end])
        raise
    end()


# Strategy from a request, ready to be launched


def build(
    *,
    strategy: Any = "auto",
    accelerator: Any = "auto",
    devices: Devices = "auto",
    num_nodes: int = 1,
    precision: Any = None,
    plugins: Any = None,
) -> Strategy:
    """Return a strategy with all its components, the same as of a Trainer with these arguments.

    This initializes no device and starts no process: :class:`~dstrat.OwnLoop` launches the strategy.

    Args:
        strategy: How training is distributed: by alias (``"ddp"``, ``"auto"`` ...) or as a Strategy.
        accelerator: Hardware by alias (``"cpu"``, ``"gpu"``, ``"auto"`` ...) or as an Accelerator.
        devices: Number of devices of each machine, or their indices: ``4``, ``"4"``, ``[0, 1]``, ``"0,1"``, ``-1``,
            ``"auto"``.
        num_nodes: Number of machines.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` ...
        plugins: Custom components, one or a list: a Precision, a ClusterEnvironment, a CheckpointIO; at most one of
            each kind.

    Raises:
        DstratError: The request is not possible; the message says what is.
    """
    request = Request(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        plugins=plugins,
    )
    return resolve_request(request)[1]
