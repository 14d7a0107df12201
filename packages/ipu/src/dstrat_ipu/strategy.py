"""The strategy that drives all IPUs from one process, with whole training steps compiled by poptorch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.strategy import CompiledSteps
from dstrat_ipu import runtime
from dstrat_ipu.loader import join_batches
from dstrat_ipu.optimizer import CompiledOptimizer
from dstrat_ipu.step_module import StepModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike

_log = logging.getLogger(__name__)
_ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"


@dataclasses.dataclass
class _Compiled:
    """A step that poptorch compiles in its first call.

    Attributes:
        step: The step as a module.
        executor: The result of ``trainingModel`` or ``inferenceModel``.
        shapes: Shapes and dtypes of the tensors of a call, from the first one on.
    """

    step: StepModule
    executor: Any
    shapes: list[tuple[torch.Size, torch.dtype]] = dataclasses.field(default_factory=list)


class IPUStrategy(SingleDeviceStrategy):
    """Training, evaluation and prediction by one process that drives all IPUs, through Graphcore's poptorch.

    poptorch compiles a full training step: forward pass, backward pass and the optimizer's step.  The module is
    replicated over the devices, so that a batch of the Trainer has ``devices * batch_size`` samples, as with one
    process for each device.  One call runs ``device_iterations * accumulate_grad_batches`` batches.

    Weights and the optimizer's state stay on the devices.  They are copied to the host for checkpoints, and when
    evaluation begins, for which the compiled training is detached from the devices; a hook that reads a parameter
    copies all of them.  A step may have tensor operations only, and shapes are static: incomplete batches are dropped.

    Args:
        accelerator: The hardware.
        device_iterations: Optimizer steps in one call of training; evaluation runs one batch in a call, unless
            ``inference_opts`` says otherwise.
        autoreport: Whether Poplar writes a report for the PopVision Graph Analyser.
        autoreport_dir: Its folder; None is the working directory.
        parallel_devices: The IPUs.
        cluster_environment: Where the job runs; there is one process.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        training_opts: ``poptorch.Options`` for training instead of those that follow from the other arguments, such as
            for a model that is split over several IPUs.
        inference_opts: Likewise for validation, test and prediction, with the same number of replicas.  With
            ``deviceIterations(n)`` a call runs n batches, and hooks around a batch are called once for all of them.
    """

    drives_several_devices = True
    accumulates_gradients = True  # within the compiled step
    allows_inference_mode = False  # poptorch cannot trace its tensors

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        training_opts: Any = None,
        inference_opts: Any = None,
    ) -> None:
        super().__init__(None, accelerator, checkpoint_io, precision_plugin)
        self.add_components(parallel_devices=parallel_devices, cluster_environment=cluster_environment)
        if not isinstance(device_iterations, int) or device_iterations < 1:
            raise RequestError(f"device_iterations={device_iterations!r} must be an int of at least 1")
        if autoreport_dir is not None and not autoreport:
            raise ConflictError(f"autoreport_dir={autoreport_dir!r} needs autoreport=True: pass it too")
        self.device_iterations = device_iterations
        self.autoreport, self.autoreport_dir = autoreport, autoreport_dir
        self._user_training_opts, self._user_inference_opts = training_opts, inference_opts
        self._training_opts: Any = None
        self._inference_opts: Any = None
        self._steps: dict[str, _Compiled] = {}
        self._classes: list[tuple[Tensor, type]] = []
        self._optimizer: CompiledOptimizer | None = None
        self._clip_val: float | None = None
        self._random_state: list[int] | None = None
        self._engine_options: str | None = None

    # The devices

    @property
    def root_device(self) -> torch.device:
        """The CPU: poptorch takes batches from the host, and returns results to it."""
        return torch.device("cpu")

    @property
    def num_devices(self) -> int:
        """Number of IPUs."""
        return len(self._present(self.components.parallel_devices, "devices"))

    @property
    def replication_factor(self) -> int:
        """Number of replicas of the module in training."""
        options = self._user_training_opts or self._user_inference_opts
        return self.num_devices if options is None else int(options.replication_factor)

    @property
    def replicas_per_process(self) -> int:
        return self.replication_factor

    @property
    def training_opts(self) -> Any:
        """The ``poptorch.Options`` of training, in a fit."""
        return self._present(self._training_opts, "options for training")

    @property
    def inference_opts(self) -> Any:
        """The ``poptorch.Options`` of validation, test and prediction, in a run."""
        return self._present(self._inference_opts, "options for inference")

    # The life cycle

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.autoreport:
            self._engine_options = os.environ.get(_ENGINE_OPTIONS)
            options = {**_engine_options_of(self._engine_options), "autoReport.all": "true"}
            if self.autoreport_dir is not None:
                Path(self.autoreport_dir).mkdir(parents=True, exist_ok=True)
                options["autoReport.directory"] = str(self.autoreport_dir)
            os.environ[_ENGINE_OPTIONS] = json.dumps(options)  # Poplar reads it when a model is compiled

    def setup(self, trainer: TrainerLike) -> None:
        self._check_replicas()
        replicas, accumulation = self.replication_factor, trainer.accumulate_grad_batches
        self._inference_opts = self._user_inference_opts or runtime.make_options(
            replicas=replicas, iterations=1, accumulation=1
        )
        # Whatever is refused is refused here: compilation takes minutes, and explains less.
        if trainer.is_fitting:
            self._training_opts = self._user_training_opts or runtime.make_options(
                replicas=replicas, iterations=self.device_iterations, accumulation=accumulation
            )
            self._check_options(accumulation)
            self._clip_val = trainer.gradient_clip_val
            if self._clip_val is not None and trainer.gradient_clip_algorithm != "norm":
                raise ConflictError(
                    f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r} is not possible in a step that "
                    "poptorch compiles, which clips by norm alone: pass 'norm', or clip nothing"
                )
        super().setup(trainer)

    def _check_replicas(self) -> None:
        """Raise an error if the user's options have more replicas than there are devices, or different numbers."""
        both = {"training_opts": self._user_training_opts, "inference_opts": self._user_inference_opts}
        factors = {name: int(options.replication_factor) for name, options in both.items() if options is not None}
        for name, factor in factors.items():
            if factor > self.num_devices:
                raise ConflictError(
                    f"{name} has replicationFactor({factor}), and devices={self.num_devices}: each replica needs at "
                    f"least an IPU, so pass devices={factor} or more, or a smaller replicationFactor"
                )
        if len(set(factors.values())) > 1:
            raise ConflictError(
                f"training_opts has replicationFactor({factors['training_opts']}), and inference_opts "
                f"replicationFactor({factors['inference_opts']}), so that a batch would have other sizes in "
                "evaluation: give both the same"
            )
        if self.replication_factor < self.num_devices:
            _log.warning(
                "replicationFactor(%d) with devices=%d: a module that poptorch.Block or BeginBlock does not divide "
                "uses %d IPUs, and the others stay idle",
                self.replication_factor,
                self.num_devices,
                self.replication_factor,
            )

    def _check_options(self, accumulation: int) -> None:
        """Raise an error if the user's options contradict the other arguments."""
        options, mode = self._training_opts, runtime.output_mode(self._training_opts)
        in_options = options.Training.gradient_accumulation
        if in_options != accumulation:
            raise ConflictError(
                f"training_opts has gradientAccumulation({in_options}), and the Trainer accumulate_grad_batches="
                f"{accumulation}: pass accumulate_grad_batches={in_options}"
            )
        if self.device_iterations not in (1, options.device_iterations):
            raise ConflictError(
                f"device_iterations={self.device_iterations} and deviceIterations({options.device_iterations}) of "
                "training_opts exclude each other: leave one of them out"
            )
        if mode not in ("All", "Final", "Default"):
            raise RequestError(
                f"training_opts has outputMode({mode}), which has no loss of a single batch: choose All or Final"
            )

    def model_to_device(self) -> None:
        pass  # poptorch copies the weights after it has compiled the first step

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConflictError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and poptorch compiles the step of "
                "one: put all parameters into groups of a single optimizer"
            )
        self._optimizer = CompiledOptimizer(self.optimizers[0], self._clip_val)

    @property
    def weighs_losses(self) -> bool:
        return False  # the compiled step has the loss alone

    def compiled_steps(self) -> CompiledSteps:
        if self._training_opts is None:
            return CompiledSteps(clips_gradients=True)
        iterations, accumulation = self._shape_of(self._training_opts)[:2]
        batches = iterations * accumulation
        return CompiledSteps(batches=batches, optimizer_steps=iterations, clips_gradients=True)

    @staticmethod
    def _shape_of(options: Any) -> tuple[int, int, int]:
        """Return device iterations, accumulated batches and replicas."""
        iterations, replicas = int(options.device_iterations), int(options.replication_factor)
        return iterations, int(options.Training.gradient_accumulation), replicas

    def teardown(self) -> None:
        try:
            self._leave_devices()
        finally:  # the module has to work on the host, also if a device has failed
            runtime.restore_classes(self._classes)
            self._steps, self._classes, self._optimizer, self._random_state = {}, [], None, None
            self._training_opts = self._inference_opts = None
            if self.autoreport:
                self._restore_engine_options()
            super().teardown()

    def _leave_devices(self) -> None:
        """Fetch the state and destroy all models, even if one of these fails; raise the first error."""
        first: Exception | None = None
        for action in (self._fetch, *(compiled.executor.destroy for compiled in self._steps.values())):
            try:
                action()
            except Exception as error:  # noqa: BLE001, PERF203 - after any error the other models must be destroyed too
                if first is None:
                    first = error
                else:
                    _log.warning("while models were destroyed: %s: %s", type(error).__name__, error)
        if first is not None:
            raise first

    def _restore_engine_options(self) -> None:
        if self._engine_options is None:
            os.environ.pop(_ENGINE_OPTIONS, None)
        else:
            os.environ[_ENGINE_OPTIONS] = self._engine_options

    # Batches

    def process_dataloader(self, dataloader: Any) -> Any:
        return join_batches(dataloader, self.training_opts, "training")

    def process_evaluation_dataloader(self, dataloader: Any) -> Any:
        return join_batches(dataloader, self.inference_opts, "evaluation")

    def evaluation_batches_per_item(self) -> int:
        iterations, accumulation, _ = self._shape_of(self.inference_opts)
        return iterations * accumulation

    # Steps

    @override
    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call of a compiled step: all its batches, and in training the optimizer's steps."""
        compiled = self._steps.get(name) or self._compile(name)
        self._detach_except(compiled)  # each model needs all IPUs
        options = self._training_opts if name == "training_step" else self._inference_opts
        return self._run(compiled, options, args, kwargs)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Detach all models before and after an evaluation, whose model copies its weights from the host."""
        self._detach_except(None)
        with super().evaluation_context():
            yield
        self._detach_except(None)

    def _compile(self, name: StepName) -> _Compiled:
        """Prepare a step for compilation, by its name, as poptorch traces a copy of the module."""
        step = StepModule(self.module, name, self.precision_plugin)
        if name != "training_step":
            step.training = self.module.training  # of the wrapper only: the loop has set that of the module
        if not self._classes:  # before trainingModel changes them
            self._classes = runtime.classes_of(self.module)
        poptorch = runtime.poptorch()
        if name == "training_step":
            executor = poptorch.trainingModel(step, self._training_opts, self._pair.device)
        else:
            executor = poptorch.inferenceModel(step, self._inference_opts)
        compiled = self._steps[name] = _Compiled(step, executor)
        return compiled

    @property
    def _pair(self) -> CompiledOptimizer:
        return self._present(self._optimizer, "optimizer")

    def _detach_except(self, compiled: _Compiled | None) -> None:
        """Detach all other models from the devices; poptorch copies weights and optimizer state to the host then."""
        for other in self._steps.values():
            if other is not compiled and other.executor.isCompiled() and other.executor.isAttachedToDevice():
                other.executor.detachFromDevice()

    def _run(self, compiled: _Compiled, options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        iterations, accumulation, replicas = self._shape_of(options)
        batches = iterations * accumulation
        if kwargs:
            raise MisuseError(f"a compiled step takes its arguments by position, and got {', '.join(kwargs)} by name")
        tensors = compiled.step.flatten((args[0], *_index_tensors(args[1:], batches, replicas)))
        self._check_shapes(compiled, tensors, batches * replicas)
        with runtime.acquiring(self.num_devices):
            if compiled.step.is_training_step:
                self._prepare(compiled.executor, tensors)
            results = compiled.executor(*tensors)
        if compiled.step.is_training_step:
            self._pair.note_step()
        # poptorch returns a single output by itself.
        outputs = [results] if isinstance(results, torch.Tensor) else list(results or ())
        returns_last = compiled.step.is_training_step and runtime.output_mode(options) in ("Final", "Default")
        returned = 1 if returns_last else batches
        size = len(tensors[0]) // batches if tensors[0].dim() else 1
        return compiled.step.finish(outputs, batches=returned, replicas=replicas, batch_size=size)

    def _prepare(self, executor: Any, tensors: list[Tensor]) -> None:
        """Copy loaded state and changed learning rates to the device."""
        pair = self._pair
        has_changed = pair.has_changed()
        if pair.state_is_pending or self._random_state is not None:
            if not executor.isCompiled():  # before that the device has no tensors to write to
                executor.compile(*tensors)
            if pair.state_is_pending:
                pair.write(self.module)
                has_changed = True  # setOptimizer is what copies it to the device
            if self._random_state is not None:
                executor.rng_state = self._random_state
                self._random_state = None
        if has_changed:  # the device would go on with the old values, without an error
            executor.setOptimizer(pair.device)

    @staticmethod
    def _check_shapes(compiled: _Compiled, tensors: list[Tensor], factor: int) -> None:
        """Raise MisuseError where poptorch would raise an error, with advice."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if not compiled.shapes:
            odd = [tuple(shape) for shape, _ in shapes if (shape[0] if shape else 1) % factor]
            if odd or not shapes:
                raise MisuseError(
                    f"a tensor of shape {odd[0] if odd else 'nothing'} cannot be divided into the {factor} parts of a "
                    "call: let each tensor of a batch have the samples along its first dimension"
                )
            compiled.shapes = shapes
        elif shapes != compiled.shapes:
            new, old = ([tuple(shape) for shape, _ in side] for side in (shapes, compiled.shapes))
            raise MisuseError(
                f"a batch has the shapes {new}, and the step was compiled for {old}: graphs are static, so pad samples "
                "to one size in collate_fn"
            )

    # State: on the host when it is read

    def _fetch(self) -> None:
        """Copy weights and the optimizer's state to the host, if those of the device are newer."""
        compiled = self._steps.get("training_step")
        if compiled is None or not compiled.executor.isCompiled():
            return
        compiled.executor.copyWeightsToHostIfNeeded()
        self._pair.fetch(self.module)

    def sharded_module_state(self) -> dict[str, Any]:
        compiled = self._steps.get("training_step")
        if compiled is not None and compiled.executor.isCompiled():
            compiled.executor.copyWeightsToHostIfNeeded()
        # Reading a parameter of poptorch's class would copy all weights from the device again.
        return dict(apply_to_tensors(super().sharded_module_state(), runtime.plain))

    def local_weights(self) -> dict[str, Any]:
        compiled = self._steps.get("training_step")
        if compiled is not None and compiled.executor.isCompiled():
            compiled.executor.copyWeightsToHostIfNeeded()
        weights = super().local_weights()
        tensors = {id(tensor): runtime.plain(tensor) for tensor in weights.values()}  # tied ones stay one object
        return {name: tensors[id(tensor)] for name, tensor in weights.items()}

    def accept_local_weights(self) -> None:
        self._detach_except(None)  # attaching copies the weights of the host to the device

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self._detach_except(None)  # attaching copies the weights of the host to the device
        super().load_module_state_dict(state, strict)

    def _host(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with the state on the host, after fetching it."""
        pair = self._pair
        if optimizer is not pair.user_optimizer:
            return optimizer
        self._fetch()
        return pair.host

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().sharded_optimizer_state(self._host(optimizer))

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._detach_except(None)
        super().load_sharded_optimizer_state(self._host(optimizer), state)
        self._pair.adopt_host_groups()
        self._pair.restore_dtypes(self.module, state["state"])

    def rank_state(self) -> dict[str, Any]:
        """Return the state of the device's random numbers, from the first call of training on."""
        compiled = self._steps.get("training_step")
        if compiled is None or not compiled.executor.isCompiled():
            return {} if self._random_state is None else self._packed(self._random_state)
        state = getattr(compiled.executor, "rng_state", None)  # which poptorch has from 3.2 on
        return {} if state is None else self._packed(state)

    def _packed(self, random_state: Sequence[int]) -> dict[str, Any]:
        return {"ipu_random": list(random_state), "ipu_replicas": self.replication_factor}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._random_state = None
        if "ipu_random" not in state:
            return
        replicas = state.get("ipu_replicas", self.replication_factor)  # which older checkpoints lack
        if replicas != self.replication_factor:
            _log.warning(
                "the checkpoint has random numbers of %d replicas, and this run has %d: they start from the seed again",
                replicas,
                self.replication_factor,
            )
            return
        self._random_state = list(state["ipu_random"])


def _engine_options_of(text: str | None) -> dict[str, Any]:
    """Return Poplar's options from the environment."""
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise RequestError(f"{_ENGINE_OPTIONS}={text!r} is no JSON object, which Poplar needs: correct or unset it")
    return options


def _index_tensors(indices: Sequence[int], batches: int, replicas: int) -> Iterator[Tensor]:
    """Yield the index of each batch of a call, for each replica, and then that of its loader, where there is one.

    As numbers they would be constants of the graph.
    """
    for position, index in enumerate(indices):
        first = torch.arange(index, index + batches) if position == 0 else torch.full((batches,), index)
        yield first.repeat_interleave(replicas)
