"""Adapter of DeepSpeed's private names: each one that this package reads, calls or replaces.

They are those of DeepSpeed 0.19.8; ``plugin.py`` requires 0.19.  Each section serves one module of the package.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dstrat.interfaces.batch import tensors_in
from dstrat.parallel.layers import is_compiled, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch.nn import Module
    from torch.optim import Optimizer


class ReplacedMethod(TorchFunctionMode):
    """A context that replaces a method of tensors, except within calls of the replacement."""

    def __init__(self, method: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        super().__init__()
        self._method, self._replacement = method, replacement

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        called = self._replacement if function is self._method else function
        return called(*args, **(kwargs or {}))


# The library and the process group: for runtime.py

_MUON = "deepspeed.runtime.zero.muon.original_muon"
_COMPATIBLE = "__compatible_ops__"
_ACTIVATION_GLOBALS = (
    "CONTIGUOUS_CHECKPOINTING",
    "CPU_CHECKPOINT",
    "PARTITION_ACTIVATIONS",
    "PROFILE_TIME",
    "SYNCHRONIZE",
    "deepspeed_checkpointing_enabled",
    "num_layers",
)


def compile_muon_late() -> None:
    """Import DeepSpeed's Muon with functions that are compiled on their first call."""
    # DeepSpeed imports it for any optimizer, for an isinstance check.  Its functions are decorated with torch.compile,
    # whose import takes a second in each rank.
    compiler: Any = import_module("deepspeed.runtime.compiler")
    original = compiler.compile
    compiler.compile = lambda: compiled_when_called
    try:
        import_module(_MUON)
    finally:
        compiler.compile = original


def compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is compiled on its first call."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the caller is being compiled, and inlines this function
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


def number_parameters_from_zero() -> None:
    """Let the numbers of stage 3's parameters begin at 0, by which ranks identify a parameter.

    DeepSpeed counts over all runs of a process, and after a failed run the counters differ between ranks.
    """
    init: Any = import_module("deepspeed.runtime.zero.partition_parameters").Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0


@contextmanager
def bound_process_group(deepspeed: Any, timeout: timedelta) -> Iterator[None]:
    """Make DeepSpeed use the open process group in a ``with`` block, at whose end the group stays open."""
    with _without_shared_memory(deepspeed):
        deepspeed.comm.init_distributed(
            deepspeed.accelerator.get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            dist_init_required=False,
            verbose=False,
        )
    comm: Any = import_module("deepspeed.comm.comm")
    # DeepSpeed passes no timeout to new groups, and the default is 30 minutes.
    comm.cdb.new_group = partial(dist.new_group, timeout=timeout)
    try:
        yield
    finally:
        # The public destroy_process_group() would also close the strategy's group.
        import_module("deepspeed.utils.groups")._release_process_group_references()
        comm.cdb = None


@contextmanager
def _without_shared_memory(deepspeed: Any) -> Iterator[None]:
    """Disable DeepSpeed's communication through shared memory, which takes minutes to compile and serves inference."""
    known = vars(deepspeed.ops)
    original = known.get(_COMPATIBLE)
    known[_COMPATIBLE] = {**(original or {}), "deepspeed_shm_comm": False}
    try:
        yield
    finally:
        if original is None:
            del known[_COMPATIBLE]  # DeepSpeed computes it on the next look-up
        else:
            known[_COMPATIBLE] = original


@contextmanager
def checks_on_device(on_device: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Make the checks that ranks agree compute on this rank's device in a ``with`` block.

    Args:
        on_device: Returns a context in which DeepSpeed takes the device from the environment.
    """
    # Each module that checks has imported the function by name.
    names = ("partitioned_param_coordinator", "partition_parameters", "stage3")
    modules: list[Any] = [import_module(f"deepspeed.runtime.zero.{name}") for name in names]
    check = import_module("deepspeed.runtime.zero.utils").assert_ints_same_as_other_ranks

    def check_on_device(numbers: list[int]) -> None:
        with on_device():
            check(numbers)

    for module in modules:
        module.assert_ints_same_as_other_ranks = check_on_device
    try:
        yield
    finally:
        for module in modules:
            module.assert_ints_same_as_other_ranks = check


@contextmanager
def activation_checkpointing(deepspeed: Any, section: Mapping[str, Any]) -> Iterator[None]:
    """Configure ``deepspeed.checkpointing.checkpoint`` by a section of the configuration in a ``with`` block."""
    # Its settings are globals of a module, and its reset() keeps most of them for the next run of the process.
    checkpointing = deepspeed.checkpointing
    settings = {name: getattr(checkpointing, name) for name in _ACTIVATION_GLOBALS}
    try:
        checkpointing.configure(
            None,
            partition_activations=section.get("partition_activations"),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
            checkpoint_in_cpu=section.get("cpu_checkpointing"),
            synchronize=section.get("synchronize_checkpoint_boundary"),
            profile=section.get("profile"),
        )
        yield
    finally:
        checkpointing.reset()
        vars(checkpointing).update(settings)


def release_groups(engine: Any) -> None:
    """Remove process groups from an object of DeepSpeed's, and from the objects that it refers to."""
    # Other ranks notice the failure of this one when its process groups close, that is, when nothing refers to them.
    # The traceback of the failure refers to the engine, and the engine to the groups.
    pending, seen = [engine], {id(engine)}
    while pending:
        attributes = vars(pending.pop())
        for name, value in list(attributes.items()):
            values = list(value.values()) if isinstance(value, dict) else value
            if any(
                isinstance(each, dist.ProcessGroup)
                for each in (values if isinstance(values, list | tuple) else [values])
            ):
                attributes[name] = None
            is_deepspeeds = type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__")
            if is_deepspeeds and id(value) not in seen:
                seen.add(id(value))
                pending.append(value)


# The engine: for engine.py


@contextmanager
def without_first_step() -> Iterator[None]:
    """Prevent DeepSpeed from stepping stage 0's optimizer in 16 bits when it wraps it."""
    # It makes a step with gradients of zero to allocate the state.  This step would decay the weights, and count in
    # Adam's bias correction.
    wrappers = [
        import_module("deepspeed.runtime.fp16.fused_optimizer").FP16_Optimizer,
        import_module("deepspeed.runtime.fp16.unfused_optimizer").FP16_UnfusedOptimizer,
    ]
    originals = [wrapper.initialize_optimizer_states for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.initialize_optimizer_states = lambda _: None
        yield
    finally:
        for wrapper, original in zip(wrappers, originals, strict=True):
            wrapper.initialize_optimizer_states = original


def keep_optimizer(optimizer: Optimizer, wrapped: Any) -> None:
    """Make DeepSpeed's wrapper step the user's optimizer."""
    # Stages 1 to 3 replace torch's Adagrad by a new object, of which schedulers and checkpoints would know nothing.
    if wrapped.optimizer is not optimizer:
        wrapped.optimizer = optimizer


def set_clipping(engine: Any, clip_val: float) -> None:
    """Set the norm by which the next step clips; 0 is none."""
    # The configuration has one value for all steps, and the Trainer's hooks may pass another one in each.
    engine._config.gradient_clipping = clip_val
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = clip_val


def prepare_manual_backward(engine: Any, loss: Tensor) -> None:
    """Prepare the engine for a backward pass within a training step (manual optimization)."""
    # The engine's forward registers these hooks on its output, for a backward pass after the step.
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):
        engine.optimizer.clear_backward_seen_flag()
    import_module("deepspeed.runtime.utils").register_output_backward_hooks(loss, engine._backward_prologue)


def forget_partial_gradients(optimizer: Any) -> None:
    """Clear accumulated gradients that the optimizer has beside those of parameters."""
    optimizer.zero_grad()
    for partial_gradients in ("averaged_gradients", "all_grad_tensors"):
        groups = getattr(optimizer, partial_gradients, {})
        for group in groups:
            groups[group] = None


def correct_by_step(optimizer: Any) -> None:
    """Make DeepSpeedCPUAdam compute its bias correction from the number of the step."""
    # It multiplies powers of the betas from step to step, and computes them with pow() if it starts with a later step:
    # a run resumed from a checkpoint would differ in the last digits.
    compiled = getattr(optimizer, "ds_opt_adam", None)
    if compiled is not None and hasattr(compiled, "adam_update") and not isinstance(compiled, _StatelessAdam):
        optimizer.ds_opt_adam = _StatelessAdam(compiled)


class _StatelessAdam:
    """The compiled functions of Adam, with an ``adam_update`` that does not depend on the previous call."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def adam_update(self, number: int, step: int, *options_and_tensors: Any) -> Any:
        """Update tensors, after an update of empty tensors with another step, which makes Adam compute the powers."""
        *options, weights, gradients, first, second = options_and_tensors
        nothing = (tensor[:0] for tensor in (weights, gradients, first, second))
        self._compiled.adam_update(number, step + 1, *options, *nothing)
        return self._compiled.adam_update(number, step, *options_and_tensors)


def share_memory(optimizer: Any) -> None:
    """Make the optimizer of stages 1 and 2 update the module's own weights instead of an equal copy."""
    # A user's change of the weights then reaches the optimizer, and the memory of the copy is freed.
    flats: Iterable[Tensor] = getattr(optimizer, "single_partition_of_fp32_groups", ())
    if not flats or optimizer.cpu_offload:
        return
    groups = zip(flats, optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True)
    for flat, partitions, group in groups:
        weights = partitions[group.rank()]
        if weights.dtype == flat.dtype and weights.device == flat.device:
            flat.data = weights.data
    optimizer._link_all_hp_params()  # safe_get_full_grad and similar functions have links to the old memory


# Parameters of stage 3: for zero3.py and user_module.py

_OBSERVERS = "_dstrat_observers"
_GATHER = "_PartitionedParameterCoordinator__all_gather_params_"
_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
_MODULE_MARKS = (
    "_external_params",
    "_original_parameters",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "ds_external_parameters",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_model_granularity",
    "ds_recompute_parameters",
    "post_bwd_fn",
    "pre_bwd_fn",
)


def scalars_as_bytes() -> AbstractContextManager[Any]:
    """Return a context in which DeepSpeed can broadcast 0-dim parameters, such as CLIP's ``logit_scale``."""
    # It broadcasts a view as bytes, which torch refuses for 0-dim tensors.

    def view(tensor: Tensor, *shape_or_dtype: Any, **kwargs: Any) -> Tensor:
        if shape_or_dtype == (torch.uint8,) and tensor.dim() == 0:
            return tensor.view(1).view(torch.uint8)
        return tensor.view(*shape_or_dtype, **kwargs)

    return ReplacedMethod(Tensor.view, view)


def replace_sharding(init: Any, take: Callable[[Module], None]) -> Callable[[Module], None]:
    """Call a function with each layer at the end of its constructor; return the one of ``deepspeed.zero.Init``."""
    shard_layer: Callable[[Module], None] = init._post_init_method  # zero.Init has no public hook
    init._post_init_method = take
    return shard_layer


def compiled_wrapper() -> Any:
    """Return the class of what ``torch.compile(layer)`` returns."""
    # The import takes a second, as the first optimizer's of torch otherwise does, and fails within zero.Init.
    return import_module("torch._dynamo.eval_frame").OptimizedModule


def skip_class(layer_class: Any) -> None:
    """Let an entered ``zero.Init`` leave out layers of a class, which have no parameters themselves."""
    # DeepSpeed looks for an attribute before the constructor, where the wrapper searches for its layer without an end.
    layer_class.__init__ = layer_class._old_init  # what DeepSpeed itself restores at the end


def secondary_shard_group(deepspeed: Any) -> Any:
    """Return ZeRO++'s group of secondary shards, if an earlier layer has made it; otherwise None."""
    return deepspeed.utils.groups._get_zero_param_intra_parallel_group()  # DeepSpeed refuses to make another one


def is_partitioned(parameter: Any) -> bool:
    """Return whether a parameter of stage 3 is partitioned at this time, not gathered."""
    status: Any = import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
    return getattr(parameter, "ds_status", None) is status.NOT_AVAILABLE


def observe_gathers(optimizer: Any, on_gather: Callable[[list[Any]], None]) -> None:
    """Call a function with the parameters of each all-gather of stage 3 in a pass, before it begins."""
    # Hooks of torch would come at other times: DeepSpeed joins parameters into buckets, and prefetches some.
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    gather = getattr(coordinator, _GATHER)

    def observed_gather(params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        on_gather([parameter for parameter in params if is_partitioned(parameter)])
        gather(params, *args, **kwargs)

    setattr(coordinator, _GATHER, observed_gather)


def observe_reductions(optimizer: Any, on_reduce: Callable[[list[Any]], None]) -> None:
    """Call a function with the parameters of each reduction of gradients in stage 3, before it begins."""
    reduce = getattr(optimizer, _REDUCE)

    def observed_reduce(communication_data_type: torch.dtype) -> None:
        on_reduce(optimizer.ipg_buckets[communication_data_type].params)
        reduce(communication_data_type)

    setattr(optimizer, _REDUCE, observed_reduce)


def gathers_exactly(optimizer: Any, parameter: Any) -> bool:
    """Return whether stage 3 gathers a parameter's values as they are, which autocast and ZeRO++ may round."""
    dtype = parameter.ds_tensor.dtype
    is_quantized = optimizer.parameter_offload.zero_quantized_weights
    return not is_quantized and getattr(parameter, "comm_dtype", dtype) == dtype


@contextmanager
def observed_releases(optimizer: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Call functions with each parameter before and after stage 3 frees its full values, in a ``with`` block.

    Blocks of several modules may end in any order.
    """
    module: Any = import_module("deepspeed.runtime.zero.partition_parameters")
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    release = coordinator.release_sub_module
    is_leaf = import_module("deepspeed.utils").z3_leaf_module

    def observed_release(layer: Module, *args: Any, **kwargs: Any) -> None:
        release(layer, *args, **kwargs)
        for parameter in layer.parameters() if is_leaf(layer) else ():
            after(parameter)

    observers = getattr(module.free_param, _OBSERVERS, None)
    if observers is None:
        module.free_param, observers = _observed_free(module.free_param)
    observer = before, after
    observers.append(observer)
    # With stage3_module_granularity_threshold it replaces the memory of layers without that function.
    if coordinator.fast_sharding_for_leaf_module:
        coordinator.release_sub_module = observed_release
    try:
        yield
    finally:
        observers.remove(observer)
        if not observers:
            module.free_param = module.free_param.__wrapped__
        vars(coordinator).pop("release_sub_module", None)


def _observed_free(free: Any) -> tuple[Any, list[Any]]:
    """Return a function that also calls pairs of functions, before and after, and their list."""
    observers: list[Any] = []

    @wraps(free)
    def observed(parameter: Any) -> None:
        for before, _ in observers:
            before(parameter)
        free(parameter)
        for _, after in observers:
            after(parameter)

    setattr(observed, _OBSERVERS, observers)
    return observed, observers


@contextmanager
def compiled_without_wrappers(module: Module) -> Iterator[None]:
    """Compile layers in place in a ``with`` block, instead of in the wrappers that ``torch.compile(layer)`` returned.

    DeepSpeed sets attributes of each module that it finds, and such a wrapper passes them on to its layer.
    """
    replaced: list[tuple[Any, str, Any, Any]] = []
    for parent in list(module.modules()):
        children: dict[str, Any] = parent._modules
        for name, wrapper in list(children.items()):  # each of them, of shared layers too
            if wrapper is not None and is_compiled(wrapper):
                layer: Any = uncompiled(wrapper)
                replaced.append((parent, name, wrapper, layer._compiled_call_impl))
                children[name] = layer
                # As Module.compile does, with the options of the wrapper.
                layer._compiled_call_impl = wrapper.dynamo_ctx(partial(_call_layer, layer))
    try:
        yield
    finally:
        for parent, name, wrapper, implementation in reversed(replaced):
            layer = uncompiled(wrapper)
            layer._compiled_call_impl = implementation
            if parent._modules.get(name) is layer:
                parent._modules[name] = wrapper


def _call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    # torch does not compile the code of its own files, such as this method, where a compiled function begins.
    return layer._call_impl(*args, **kwargs)


def remove_marks(module: Module) -> None:
    """Remove DeepSpeed's attributes from the layers of a module, which the engine's ``destroy`` leaves there."""
    for layer in module.modules():
        attributes = vars(layer)
        if "_original_parameters" in attributes:
            attributes["_parameters"] = dict(attributes["_parameters"].items())  # DeepSpeed's dict gathers on look-up
        for name in _MODULE_MARKS:
            attributes.pop(name, None)


def restore_linear() -> None:
    """Restore ``torch.nn.functional.linear``."""
    # Stage 3 replaces it by a version that saves memory, and never restores it.
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original


# Gradients: for unused_parameters.py


def gradient_buffers(optimizer: Any) -> dict[int, Tensor]:
    """Return the buffers in which stage 3 accumulates gradients, by the ids of parameters."""
    buffers: dict[int, Tensor] = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    return buffers


def offload_gradients(optimizer: Any, parameters: Iterable[Any]) -> None:
    """Copy gradients of stage 3 to its optimizer on the CPU, as the last backward pass of a step does."""
    gradients: dict[int, list[Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    buffers = gradient_buffers(optimizer)
    for parameter in parameters:
        optimizer._offload_grad_partition_at_boundary(parameter, buffers[parameter.ds_id], gradients, offsets)
    optimizer._swap_out_offload_fp32_gradients(gradients, offsets)


def offloaded_ids(optimizer: Any, *, in_step: bool) -> Any:
    """Return the ids of parameters whose gradients stage 3 has copied to the CPU, in the step or the backward pass."""
    return optimizer._offload_boundary_param_ids if in_step else optimizer.norm_for_param_grads


def forget_offloaded_gradients(optimizer: Any) -> None:
    """Clear the records of gradients that an optimizer on the CPU has received, for a step that is not made."""
    optimizer.norm_for_param_grads = {}
    is_stage_3 = hasattr(optimizer, "grad_partitions_flat_buffer")
    (optimizer._offload_boundary_param_ids if is_stage_3 else optimizer._offload_accumulated_param_ids).clear()


# Gradients accumulated since the last step, which each stage stores in another way: for checkpoint.py

_BY_PARAMETER = ("grad", "grad_accum")


def accumulated_gradients(optimizer: Any) -> dict[str, Any]:
    """Return this rank's accumulated gradients of stages 1 to 3, in the form of the stage; an empty dict for none."""
    if hasattr(optimizer, "fp32_groups_has_gradients"):  # stage 1 with weights of 16 bits and gradients of 32
        computed = [list(group) for group in optimizer.fp32_groups_has_gradients]
        flat = list(optimizer.fp32_groups_gradients_flat)
        return {"flat": flat, "computed": computed} if any(map(any, computed)) else {}
    if hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3
        # It counts a backward pass when the next one begins; until then a flag says that it has ended.
        batches = int(optimizer.micro_step_id) + int(optimizer._epilogue_ran_this_backward)
        return {"flat": optimizer.grad_partitions_flat_buffer, "batches": batches} if batches > 0 else {}
    gradients: dict[str, Any] = {
        key: {
            number: value
            for number, parameter in _parameters(optimizer).items()
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
    gradients["cpu"] = {  # without those of an earlier step, which stay in the dict
        str(number): value
        for number, value in getattr(optimizer, "accumulated_grads_in_cpu", {}).items()
        if number in optimizer._offload_accumulated_param_ids
    }
    present = {key: value for key, value in gradients.items() if value}
    return {**present, "batches": optimizer.micro_step_id} if present else {}


def scale_gradients(optimizer: Any, parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients of any stage after the last backward pass, before the step that unscales and clips them."""
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # stages 0 and 1 with gradients of 32 bits
        gradients = list(optimizer.fp32_groups_gradients_flat)
    elif hasattr(optimizer, "averaged_gradients"):  # stages 1 to 3
        partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
        partitions = optimizer.fp32_partitioned_groups_flat if partitions is None else partitions
        gradients = [partition.grad for partition in partitions if partition.grad is not None]  # offloaded ones
        gradients += [one for group in optimizer.averaged_gradients.values() for one in group or () if one is not None]
        norms = getattr(optimizer, "norm_for_param_grads", {})  # of offloaded gradients, computed in backward passes
        norms.update({number: norm * factor for number, norm in norms.items()})
    else:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    _multiply(gradients, optimizer, factor)


def scale_partial_gradients(optimizer: Any, factor: float | Tensor) -> None:
    """Multiply gradients of stages 1 to 3 that backward passes have accumulated, none of which was the last one."""
    _multiply(tensors_in(accumulated_gradients(optimizer)), optimizer, factor)


def _multiply(gradients: Iterable[Tensor], optimizer: Any, factor: float | Tensor) -> None:
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        # Copies to the CPU, which multiplies them, may not have ended.
        import_module("deepspeed.accelerator").get_accelerator().synchronize()
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)


def restore_gradients(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Restore the result of :func:`accumulated_gradients`, of the same stage and number of ranks."""
    if not saved:
        return
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        for buffer, value in zip(optimizer.fp32_groups_gradients_flat, saved["flat"], strict=True):
            buffer.copy_(value)
        optimizer.fp32_groups_has_gradients = [list(group) for group in saved["computed"]]
        return
    optimizer.micro_step_id = saved["batches"]
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.grad_partitions_flat_buffer.copy_(saved["flat"])
        optimizer.independent_gradient_partition_epilogue()  # for a step without another backward pass before it
        optimizer._epilogue_ran_this_backward = False  # micro_step_id counts that pass already
        return
    parameters = _parameters(optimizer)
    for key in _BY_PARAMETER:
        for number, value in saved.get(key, {}).items():
            setattr(parameters[number], key, value.to(parameters[number].device))
    for group, values in saved.get("all", {}).items():
        device = optimizer.bit16_groups_flat[int(group)].device
        optimizer.all_grad_tensors[int(group)] = [value.to(device) for value in values]
    for group, value in saved.get("flat", {}).items():
        # This function makes the buffer if there is none yet.
        optimizer._get_compact_grad_partition_buffer(int(group)).flat_partition.copy_(value)
    for number, value in saved.get("cpu", {}).items():
        optimizer.accumulated_grads_in_cpu[int(number)] = value
        optimizer._offload_accumulated_param_ids.add(int(number))


def _parameters(optimizer: Any) -> dict[str, Any]:
    return {
        str(optimizer.get_param_id(parameter)): parameter for group in optimizer.bit16_groups for parameter in group
    }


# Files: for native_save.py and nvme.py


@contextmanager
def errors_after_saving(engine: Any) -> Iterator[None]:
    """Defer errors of ``save_checkpoint`` to the end of a ``with`` block, and raise the first one there."""
    # DeepSpeed has collectives between the files and after them, in which the other ranks would wait for a rank that
    # raises earlier, for example because its disk is full.
    errors: list[Exception] = []

    def deferring(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - torch.save raises several classes; raised again below
                errors.append(error)
                return None

        return call

    writer = engine.checkpoint_engine
    methods = ((writer, "makedirs"), (writer, "save"), (engine, "_copy_recovery_script"))
    for owner, name in methods:
        setattr(owner, name, deferring(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods:
            delattr(owner, name)
    if errors:
        raise errors[0]


def register_new_state(swapper: Any, tensor: Tensor) -> None:
    """Register the state that a first step has added with the swapper, which would do so when it writes next."""
    swapper._get_param_swap_info(tensor)
