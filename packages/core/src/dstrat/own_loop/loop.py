"""A strategy with a module, its optimizers and its loaders, for a loop that the user has written."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dstrat.data.random_state import RandomState
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.strategy import Strategy
from dstrat.own_loop import checkpoint
from dstrat.own_loop.loaders import EvaluationLoader, TrainingLoader
from dstrat.own_loop.running import communicating
from dstrat.own_loop.settings import Settings
from dstrat.own_loop.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm

T = TypeVar("T")

_STEP_NAMES = ("training_step", "validation_step")


class OwnLoop:
    """Launches a strategy, and does in each of its processes what a hand-written loop needs of it.

    The function that is launched gets the loop as its first argument::

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

    Everything else is the strategy's own: ``loop.strategy.reduce(loss)``, ``barrier``, ``all_gather``,
    ``clip_gradients``, ``is_global_zero``, ``world_size`` ...

    Args:
        strategy: What :func:`dstrat.build` returned.

    Attributes:
        strategy: As it was given.
    """

    def __init__(self, strategy: Strategy) -> None:
        if not isinstance(strategy, Strategy):
            raise MisuseError(
                f"OwnLoop was given {strategy!r}, which is no Strategy: OwnLoop(dstrat.build(strategy={strategy!r}))"
            )
        self.strategy = strategy
        self._steps: Steps | None = None
        self._loaders: list[TrainingLoader] = []
        self._evaluated: list[weakref.ref[EvaluationLoader]] = []
        self._is_launched = False

    # Launching

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``function(loop, *args, **kwargs)`` in every process of the job and wait for all of them.

        However it ends, communication is closed and no process is left; a rank that fails ends all others.

        Returns:
            What the function returned in this process; where it did not run here, what it returned in global rank 0.

        Raises:
            RankFailedError: A rank failed; the error has its number and its traceback.
        """
        if self._is_launched:
            raise MisuseError("launch was called in a function that is launched already: call it after that has ended")
        launcher = self.strategy.launcher
        if launcher is None:
            return self._run(None, function, args, kwargs)
        random_state = None if launcher.runs_here else RandomState.capture()
        result: T = launcher.launch(self._run, random_state, function, args, kwargs)
        return result

    def _run(
        self, random_state: RandomState | None, function: Callable[..., T], args: Any, kwargs: Mapping[str, Any]
    ) -> T:
        """Call the function in this process, between the beginning and the end of communication."""
        if random_state is not None:
            random_state.restore()
        self._is_launched = True
        with communicating(self.strategy, self._end):
            return function(self, *args, **kwargs)

    def _end(self) -> None:
        self._is_launched = False
        if self._steps is not None:
            for name in _STEP_NAMES:
                self.strategy.module.__dict__.pop(name, None)
        self._steps, self._loaders, self._evaluated = None, [], []
        self.strategy.teardown()

    # What is trained

    def setup(
        self,
        module: Module,
        make_optimizers: Callable[[Any], Any] | None = None,
        *,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm = "norm",
        sync_batchnorm: bool = False,
    ) -> None:
        """Bring a module into the strategy's hands: precision, device, wrapping or sharding; and make its optimizers.

        Args:
            module: Any ``nn.Module``; it stays what it is, with its own names.
            make_optimizers: Returns for the module, when it is on its device, an optimizer, or whatever a module's
                ``configure_optimizers`` may return; None where it is only evaluated.
            accumulate_grad_batches: Batches whose gradients make up one optimizer step.
            gradient_clip_val: Largest norm or value of gradients, to which :meth:`step` clips them.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``.
            sync_batchnorm: Whether batch-norm layers share their statistics over all processes.
        """
        self._check_launched("setup")
        if self._steps is not None:
            raise MisuseError("setup was called twice: put the modules into one, such as a torch.nn.ModuleDict")
        settings = Settings(
            strategy=self.strategy,
            make_optimizers=make_optimizers,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
        )
        strategy = self.strategy
        strategy.connect(module)
        if sync_batchnorm:
            strategy.synchronize_batchnorm()
        for name in _STEP_NAMES:  # a strategy runs steps by their names; here a step is any function
            strategy.module.__dict__[name] = _call
        self._steps = Steps(settings)
        strategy.setup(settings)
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
        """The learning-rate schedulers that were made with the optimizers; the loop steps them, and they are saved."""
        return [config.scheduler for config in self.strategy.lr_schedulers]

    def training_loader(self, loader: Any, *, distribute: bool = True) -> TrainingLoader:
        """Return this process's part of a loader, on its device; checkpoints know the place in it.

        Args:
            loader: A DataLoader or another iterable of batches, of the batch size of one process.
            distribute: Whether the data is divided between the processes; False where the loader has this one's part.
        """
        self._check_launched("training_loader")
        self._loaders.append(TrainingLoader(loader, self.strategy, distribute=distribute))
        return self._loaders[-1]

    def evaluation_loader(self, loader: Any, *, distribute: bool = True) -> EvaluationLoader:
        """Return this process's part of a loader, on its device; in the whole job each sample is read once.

        Args:
            loader: A DataLoader or another iterable of batches.
            distribute: Whether the data is divided between the processes; False where the loader has this one's part.
        """
        self._check_launched("evaluation_loader")
        made = EvaluationLoader(loader, self.strategy, distribute=distribute)
        self._evaluated.append(weakref.ref(made))  # a loop may make one for each epoch
        return made

    @property
    def _evaluation_loaders(self) -> list[EvaluationLoader]:
        """Those that the loop still has, in the order in which they were made."""
        return [loader for made in self._evaluated if (loader := made()) is not None]

    # Steps

    def compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the module in the strategy's wrapper and in its precision, and return what it returns.

        With gradients switched on it is a training step, whose result :meth:`backward` takes; otherwise it evaluates.

        Args:
            function: The module itself, one of its methods, or any function that calls them.
            *args: What it takes.
            **kwargs: What it takes.
        """
        return self._set_up("compute").compute(function, *args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss (a scalar tensor), divided by the number of batches that are accumulated.

        Where several optimizers step one by one, gradients that none has used since the last step are dropped first: a
        loss's gradients are for the steps that come between it and the next one.
        """
        self._set_up("backward").backward(loss)

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """Clip the gradients as :meth:`setup` was told, step the optimizer and clear them, once per group of batches.

        Args:
            optimizer: Which one, where there are several.

        Returns:
            Whether the optimizer stepped: False until the gradients of ``accumulate_grad_batches`` are there.
        """
        return self._set_up("step").step(optimizer)

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps since :meth:`setup`, with those of the checkpoint from which the loop went on."""
        return 0 if self._steps is None else self._steps.num_done

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """In this context the module is in evaluation mode, without gradients; all processes enter it."""
        self._set_up("evaluation")
        module: Module = self.strategy.module
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            with torch.no_grad(), self.strategy.evaluation_context():
                yield
        finally:
            for part, was_training in modes:
                part.training = was_training

    # State

    def save_checkpoint(self, path: str | Path, state: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, which any strategy on any number of processes can go on from; every process calls it.

        It has module, optimizers, schedulers, precision, the place in each training loader, random numbers, and:

        Args:
            path: Where there is nothing yet.
            state: What else the loop wants back: plain values and tensors, the same in every process.
        """
        steps = self._set_up("save_checkpoint")
        steps.check_nothing_waits()
        saved = {"steps_done": steps.num_done, "own": dict(state or {})}
        checkpoint.save(self.strategy, path, saved, self._loaders, self._evaluation_loaders)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Bring everything to where it was, and return the state that was saved; every process calls it.

        Call it after :meth:`setup` and :meth:`training_loader`; gradients that wait for their step are dropped.  With
        the same strategy on as many processes the loop goes on bit for bit; on others the data goes on at the same part
        of the epoch, and random numbers start anew.

        Raises:
            CheckpointError: It cannot be read, or does not fit this loop.
        """
        steps = self._set_up("load_checkpoint")
        state = checkpoint.load(self.strategy, path, self._loaders, self._evaluation_loaders)
        steps.go_on_after(state["steps_done"])
        own: dict[str, Any] = state["own"]
        return own

    # How

    def _check_launched(self, name: str) -> None:
        if not self._is_launched:
            raise MisuseError(f"{name} works in each process of the job: call it in the function that launch runs")

    def _set_up(self, name: str) -> Steps:
        self._check_launched(name)
        if self._steps is None:
            raise MisuseError(f"{name} was called before setup: call loop.setup(module, make_optimizers) first")
        return self._steps


def _call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Be a step of the module, which runs whatever function it is given."""
    return function(*args, **kwargs)
