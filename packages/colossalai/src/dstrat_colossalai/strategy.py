"""Strategy of Colossal-AI: its booster with the plugins Gemini, LowLevelZero, TorchDDP and TorchFSDP."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import load_by_names, load_named_state, named_state, named_weights
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.step_module import StepModule
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_colossalai.internals import GEMINI_OPTIMIZERS, Booster, check_reduced, set_accelerator
from dstrat_colossalai.options import PLUGINS, check_keywords, gemini_options, trainer_options
from dstrat_colossalai.precision import BoosterPrecision

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Components, StepName, TrainerLike


_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes, of DistributedDataParallel


class ColossalAIStrategy(ParallelStrategy):
    """Training with Colossal-AI's booster.

    The plugin Gemini shards and offloads parameters, gradients and optimizer state in chunks, on CUDA devices.  The
    derived classes have the other plugins; only ColossalAITorchDDPStrategy runs on the CPU.

    Args:
        use_chunk: True; Gemini always uses chunks.
        chunk_size: None; Gemini searches for it.
        enable_distributed_storage: Whether parameters are sharded too, or else only gradients and optimizer state.
        placement_policy: ``"auto"``, ``"static"``, ``"cuda"`` or ``"cpu"``: where Gemini's chunks are.
        force_outputs_fp32: Whether outputs of the module are float32.
        gpu_margin_mem_ratio: Share of the free memory of the GPU for optimizer state.
        chunk_search_range: Largest difference of chunk sizes that are tried, in elements.
        chunk_search_n_grids: 4096; of earlier versions.
        min_chunk_size: Smallest size of a chunk, in elements.
        initial_scale: Initial loss scale.
        min_scale: Smallest loss scale.
        growth_factor: Factor by which the loss scale grows.
        backoff_factor: Factor by which it shrinks after an overflow.
        growth_interval: Steps without an overflow before it grows.
        hysteresis: Overflows before it shrinks.
        max_scale: Largest loss scale.
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a collective waits for the other ranks before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **plugin_kwargs: Passed to the plugin, such as ``stage`` and ``cpu_offload``, or ``find_unused_parameters``.

    Raises:
        RequestError: An option is no longer one of Colossal-AI.
        MisuseError: The plugin has no such keyword.
        ConflictError: It gets the CPU for a plugin that needs CUDA.
    """

    allows_new_optimizers = False  # the booster has wrapped the optimizer
    allows_inference_mode = False
    plugin: ClassVar[str] = "gemini"

    def __init__(
        self,
        use_chunk: bool = True,
        chunk_size: int | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: str = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * 1024**2,
        chunk_search_n_grids: int = 4096,
        min_chunk_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        **plugin_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
        )
        plugin = self.plugin
        check_keywords(plugin, plugin_kwargs, type(self))
        scale = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        self._options: dict[str, Any] = dict(plugin_kwargs)
        if plugin == "low_level_zero":
            self._options = {**scale, **plugin_kwargs}
        elif plugin == "gemini":
            chunks = {
                "use_chunk": use_chunk,
                "chunk_size": chunk_size,
                "enable_distributed_storage": enable_distributed_storage,
                "placement_policy": placement_policy,
                "force_outputs_fp32": force_outputs_fp32,
                "gpu_margin_mem_ratio": gpu_margin_mem_ratio,
                "chunk_search_range": chunk_search_range,
                "chunk_search_n_grids": chunk_search_n_grids,
                "min_chunk_size": min_chunk_size,
            }
            self._options = {**gemini_options({**chunks, **scale}), **plugin_kwargs}
        self.replicates_state = not self._is_sharded
        self.evaluates_together = plugin in ("gemini", "torch_fsdp")  # each step gathers parameters
        self._booster: Any = None
        self._boosted: Any = None
        self._accumulates = False

    @property
    def _is_sharded(self) -> bool:
        return self.plugin != "torch_ddp"

    def check_training(self, training: TrainingSize) -> None:
        finds_unused = self._options.get("find_unused_parameters") or self._options.get("static_graph")
        if training.unused and not self._is_sharded and not finds_unused:
            raise RequestError(_unused_parameters_text(training.unused))

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        if self.plugin != "torch_ddp":  # chunks and buckets of the others are Colossal-AI's to choose
            return None
        ranks, gradients, buffers = training.world_size, training.trainable_parameters, training.module_buffers
        buckets = 1 + math.ceil(max(0, gradients - _FIRST_BUCKET) / _BUCKET)
        reduction = Collective(kind="all_reduce", bytes=gradients, messages=buckets, ranks=ranks, overlaps=True)
        collectives = [reduction]
        if buffers and self._options.get("broadcast_buffers", True):
            collectives.append(Collective(kind="broadcast", bytes=buffers, messages=1, ranks=ranks))
        return CommunicationLayout(collectives=tuple(collectives), copied=4 * gradients)

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        if not self._is_sharded:
            return
        for device in self.components.parallel_devices or ():
            if device.type != "cuda":
                raise ConflictError(
                    f"Colossal-AI's plugin {self.plugin!r} trains on CUDA devices only, and this is the accelerator "
                    f"{device.type!r}: use strategy='colossalai_torch_ddp', or 'fsdp' or 'deepspeed_stage_3', which "
                    "run here too"
                )

    def precision_for(self, flag: str) -> Precision | None:
        """Return the plugin's half precision, which scales the loss by itself; None where the plugin has none."""
        is_half = self.plugin in ("gemini", "low_level_zero") and flag in ("16-mixed", "bf16-mixed")
        return BoosterPrecision(flag) if is_half else None

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        self._check_optimizers()
        # Colossal-AI takes CUDA wherever it is there, also for a module on the CPU.
        set_accelerator(self.root_device.type)
        self._accumulates = trainer.accumulate_grad_batches > 1
        following = trainer_options(
            self.plugin,
            self.precision_plugin.flag,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            trainer.accumulate_grad_batches,
            self._options.get("stage", 1),
        )
        self._booster = Booster(plugin=PLUGINS[self.plugin](**self._options, **following))
        # All steps are one forward of the wrapper, in which plugins gather parameters and prepare the reduction.
        self.model, self._boosted, *_ = self._booster.boost(StepModule(self.module), self.optimizers[0])
        if self._is_sharded:  # with DistributedDataParallel, schedulers and callbacks keep the user's optimizer
            self.optimizers = [self._boosted]

    def _check_optimizers(self) -> None:
        on_several = self.plugin == "torch_ddp" and self.world_size > 1
        if on_several and not getattr(self.module, "automatic_optimization", True):
            # The backward pass would run within the wrapper's forward, which prepares the reducer only at its end.
            raise ConflictError(
                "manual optimization on several processes is not possible with strategy='colossalai_torch_ddp': use "
                "strategy='ddp', or the optimization of the Trainer"
            )
        if len(self.optimizers) != 1:
            raise MisuseError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and Colossal-AI's booster takes "
                "one: put the parameters into groups of a single optimizer"
            )
        [optimizer] = self.optimizers
        if self.plugin == "gemini" and type(optimizer) not in GEMINI_OPTIMIZERS:
            names = ", ".join(cls.__name__ for cls in GEMINI_OPTIMIZERS)
            raise MisuseError(
                f"configure_optimizers returned {type(optimizer).__name__}, and Gemini steps in chunks with {names} "
                "only: return colossalai.nn.optimizer.HybridAdam(self.parameters()), which is AdamW"
            )
        if self.plugin == "torch_fsdp" and len(optimizer.param_groups) > 1:
            raise MisuseError(
                f"configure_optimizers returned {len(optimizer.param_groups)} groups of parameters, and Colossal-AI's "
                "TorchFSDPPlugin makes them one: return one group, or use strategy='fsdp'"
            )

    def on_exception(self, exception: BaseException) -> None:
        self._unwrap()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._unwrap()  # before the process group, of which plugins destroy subgroups
        super().teardown()

    def _unwrap(self) -> None:
        self.model = self._module  # None where an error came before there was a module
        self._booster = self._boosted = None

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = self.module_step("training_step")
        if self._is_sharded or self._booster is None:
            return self.run_step("training_step", step, *args, **kwargs)
        # Evaluation runs without DistributedDataParallel, which communicates: ranks may have other numbers of batches.
        return super().run_step("training_step", partial(self.model, step), *args, **kwargs)

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_sharded and self._booster is not None:
            step = partial(self.model, step)
        return super().run_step(name, step, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.module_backward is not None:  # the user's own, which is called as it is
            super().backward(loss, *args, **kwargs)
        else:
            self._booster.backward(self.precision_plugin.scale_loss(loss), self._boosted, *args, **kwargs)
        if not self._is_sharded:
            self._check_reduction()

    def _check_reduction(self) -> None:
        """Raise MisuseError for parameters without a gradient, for which DistributedDataParallel waits."""
        try:
            check_reduced(self.model)
        except RuntimeError as error:
            named = self.module.named_parameters()
            unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
            raise MisuseError(_unused_parameters_text(unused)) from error

    def evaluation_context(self) -> AbstractContextManager[Any]:
        if not self._is_sharded:  # the last step has changed buffers by the data of each rank
            self.broadcast_tensors(self.module.buffers())
        return super().evaluation_context()

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate; Gemini and FSDP reduce each batch and add the shards."""
        if self._booster is None:
            return nullcontext()
        if self.plugin == "gemini" and not self._accumulates:
            raise ConflictError(
                "Gemini accumulates gradients only if it is made for that: pass accumulate_grad_batches to the "
                "Trainer, and let it accumulate"
            )
        if self.plugin in ("torch_ddp", "low_level_zero") and self._booster.plugin.support_no_sync():
            context: AbstractContextManager[Any] = self._booster.no_sync(self.model, self._boosted)
            return context
        return nullcontext()

    @property
    def weighs_losses(self) -> bool:
        return not self._accumulates or self._can_scale

    @property
    def _can_scale(self) -> bool:
        return self.plugin not in ("gemini", "low_level_zero")  # which keep gradients until the step

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients; Gemini and LowLevelZero keep theirs until the step.

        Raises:
            ConflictError: The plugin is one of these.
        """
        if not self._can_scale:
            raise ConflictError(
                f"an optimizer step has fewer batches than it was begun with, and the plugin {self.plugin!r} cannot "
                "scale the gradients that it has accumulated: let accumulate_grad_batches divide the number of "
                "batches, return a loss for each, and resume from a checkpoint between two steps"
            )
        super().scale_gradients(optimizer, factor)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients; Gemini and LowLevelZero do so in their step."""
        if self.plugin == "torch_ddp":
            super().clip_gradients(optimizer, clip_val, algorithm)
        elif self.plugin == "torch_fsdp":
            if algorithm != "norm":
                raise ConflictError(
                    f"gradient_clip_algorithm={algorithm!r} cannot be combined with the sharded gradients of "
                    "TorchFSDPPlugin: clip by 'norm', or use strategy='colossalai_torch_ddp'"
                )
            self.model.module.clip_grad_norm_(clip_val)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        if not self._is_sharded:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        output = closure()  # plugins cannot call it within their step
        self._boosted.step()
        return output

    # State: of sharded plugins it is gathered on each rank, so that checkpoints move to other strategies

    def sharded_module_state(self) -> dict[str, Any]:
        """Return the full state of the module on each rank; collective."""
        if not self._is_sharded or self._booster is None:
            return super().sharded_module_state()
        arguments = {"only_rank_0": False} if self.plugin == "gemini" else {}
        state = self._state_owner.state_dict(**arguments)
        return {name.removeprefix("module."): value for name, value in state.items()}

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        """Load a full state, which each rank has; collective."""
        if not self._is_sharded or self._booster is None:
            return
        load_by_names(self._state_owner, {f"module.{name}": value for name, value in state.items()})
        if self.plugin == "low_level_zero":  # its next step would restore the parameters from its float32 copies
            self._boosted.update_master_params(self.model)

    @property
    def _state_owner(self) -> Any:
        """The wrapper with the full state: Gemini's gathers the chunks."""
        return self.model if self.plugin == "gemini" else self.model.module

    def local_weights(self) -> dict[str, Any]:
        if self.plugin in ("gemini", "torch_fsdp"):
            raise ConflictError(
                f"ColossalAI's plugin {self.plugin!r} joins parameters in shards without their names; "
                "plugin='low_level_zero' and strategy='fsdp' do not"
            )
        return named_weights(self.module)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer by the names of its parameters, on each rank; collective."""
        return named_state(self._with_full_state(optimizer), self.module)

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state of :meth:`sharded_optimizer_state`; collective."""
        load_named_state(self._with_full_state(optimizer), self.module, state)

    def _with_full_state(self, optimizer: Optimizer) -> Any:
        """Return the optimizer, or what has its methods for the full state where its own are of shards."""
        if self.plugin == "gemini":
            return _GeminiState(optimizer)
        return _FSDPState(optimizer, self.model.module) if self.plugin == "torch_fsdp" else optimizer


def _unused_parameters_text(names: Sequence[str]) -> str:
    return (
        f"the step used no {', '.join(names)}, and DistributedDataParallel waits for the gradients: pass "
        "ColossalAITorchDDPStrategy(find_unused_parameters=True)"
    )


class ColossalAILowLevelZeroStrategy(ColossalAIStrategy):
    """Training with Colossal-AI's LowLevelZero: sharded optimizer state, and gradients with ``stage=2``."""

    plugin = "low_level_zero"


class ColossalAITorchDDPStrategy(ColossalAIStrategy):
    """Training with Colossal-AI's booster and torch's DistributedDataParallel, on the CPU too."""

    plugin = "torch_ddp"


class ColossalAITorchFSDPStrategy(ColossalAIStrategy):
    """Training with Colossal-AI's booster and torch's FullyShardedDataParallel."""

    plugin = "torch_fsdp"


class _GeminiState:
    """The full state of Gemini's optimizer on each rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.load_state_dict = optimizer.load_state_dict

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state_dict(only_rank_0=False)
        return state


class _FSDPState:
    """The full state of an optimizer of a module in FullyShardedDataParallel, on each rank."""

    def __init__(self, optimizer: Any, module: FullyShardedDataParallel) -> None:
        self._optimizer, self._module = optimizer, module
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        full = FullyShardedDataParallel.full_optim_state_dict(self._module, self._optimizer, rank0_only=False)
        return FullyShardedDataParallel.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, self._module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # FSDP's functions name parameters, and torch's optimizers number them.
        named = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self._module)
        self._optimizer.load_state_dict(FullyShardedDataParallel.shard_full_optim_state_dict(named, self._module))
