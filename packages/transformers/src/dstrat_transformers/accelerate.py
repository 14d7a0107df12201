"""Accelerate's Accelerator with a strategy of dstrat; it adds to its lists of prepared models and loaders."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, convert_to_fp32, recursively_apply, release_memory
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError
from dstrat_transformers.prepared_model import ONE_MODEL, PreparedModel, names_in_groups
from dstrat_transformers.session import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dstrat.interfaces.strategy import Strategy

_logger = logging.getLogger(__name__)

_PLUGINS = {  # of the state of an Accelerator, and how a program asks for them
    "fsdp_plugin": "fsdp",
    "deepspeed_plugin": "deepspeed",
    "megatron_lm_plugin": "megatron_lm_plugin",
    "parallelism_config": "parallelism_config",
}


class DstratAccelerator(Accelerator):  # type: ignore[misc]  # not imported by mypy
    """An Accelerator whose models are trained by the strategy that :func:`use` has selected.

    It takes the arguments of Accelerator, whose processes, precision, data, trackers and files it has; the strategy
    wraps or shards the model, synchronizes gradients, clips, and steps.  One model is trained at a time, together with
    its optimizers, and stays the same object.

    Args:
        *args: As of Accelerator.
        **kwargs: As of Accelerator.

    Raises:
        MisuseError: No strategy has been selected, or Accelerate has been used before.
        ConflictError: Another way of distribution was requested from Accelerate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._select_strategy()

    @classmethod
    def convert(cls, accelerator: Accelerator, *, runs_steps: bool = False) -> None:
        """Turn an Accelerator that another library has made, and not used yet, into one with a strategy.

        Args:
            accelerator: The Accelerator.
            runs_steps: Whether the loop lets the strategy run forward and backward passes together, if it has to.
        """
        accelerator.__class__ = cls
        accelerator.ddp_handler = None  # of transformers' Trainer, for its own DDP
        accelerator._select_strategy()  # noqa: SLF001 - of this class
        accelerator._runs_steps = runs_steps  # noqa: SLF001 - likewise

    def _select_strategy(self) -> None:
        session = current_session()
        if self.num_processes != session.world_size:
            raise MisuseError(
                f"Accelerate knows of {self.num_processes} processes, and there are {session.world_size}: call "
                "dstrat_transformers.use before TrainingArguments, Accelerator or PartialState are made"
            )
        for name, option in _PLUGINS.items():
            if getattr(self.state, name, None) is not None:
                raise ConflictError(
                    f"{option} distributes the model in Accelerate, and dstrat_transformers.use has selected the "
                    f"strategy {session.request.strategy!r}: leave one of the two out"
                )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise ConflictError(
                "torch_compile, or Accelerate's dynamo_backend, compiles the model around the strategy's step, which "
                "is not possible: leave it out"
            )
        self._check_handlers()
        self._strategy = session.make_strategy(self.mixed_precision)
        self._prepared: PreparedModel | None = None  # the trained one, if there is one
        self._references: list[ref[PreparedModel]] = []  # to the preparations by this accelerator
        self._first_readers: list[int] | None = None
        self._gathers_once = self._runs_steps = False
        self.native_amp, self.scaler = False, None  # the strategy's precision has both
        self.register_load_state_pre_hook(self._load_sharded_model)

    def __getstate__(self) -> dict[str, Any]:
        # As functions for workers, and those that datasets hashes, may refer to it.  A strategy belongs to its process.
        of_strategy: dict[str, Any] = {"_strategy": None, "_prepared": None, "_references": []}
        return {**self.__dict__, **of_strategy, "_models": [], "_optimizers": [], "_schedulers": []}

    def _check_handlers(self) -> None:
        """Refuse or log ``kwargs_handlers`` that the strategy does not follow."""
        if self.mixed_precision != "no" and self.autocast_handler is not None and not self.autocast_handler.enabled:
            raise ConflictError(
                "AutocastKwargs(enabled=False) in kwargs_handlers leaves models in float32, and a strategy runs them "
                f"in mixed_precision={self.mixed_precision!r}: pass mixed_precision='no', or give the handler to "
                "accelerator.autocast"
            )
        ignored = {
            "DistributedDataParallelKwargs": (self.ddp_handler, "is of Accelerate's own DDP"),
            "InitProcessGroupKwargs": (self.init_handler, "comes after dstrat_transformers.use, which has opened it"),
        }
        for name, (handler, reason) in ignored.items():
            options = {} if handler is None else handler.to_kwargs()
            if options and self.is_main_process:
                arguments = ", ".join(f"{option}={value!r}" for option, value in options.items())
                _logger.warning(
                    "%s(%s) in kwargs_handlers has no effect, as it %s: construct the strategy with its arguments, "
                    "such as dstrat_ddp.DDPStrategy(find_unused_parameters=True, timeout=...)",
                    name,
                    arguments,
                    reason,
                )

    @property
    def strategy(self) -> Strategy:
        """The strategy, with its environment set up."""
        return self._strategy

    @property
    def _preparations(self) -> list[PreparedModel]:
        """The preparations by this accelerator that have not ended, in their order, which is that of all processes."""
        alive = (reference() for reference in self._references)
        return [prepared for prepared in alive if prepared is not None and not prepared.is_released]

    @property
    def prepared_model(self) -> PreparedModel:
        """The model that was prepared.

        Raises:
            MisuseError: None was.
        """
        if self._prepared is None:
            raise MisuseError("no model is prepared: call accelerator.prepare(model, optimizer) first")
        return self._prepared

    # Preparation

    @override
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        models = [one for one in args if isinstance(one, Module) and not _is_loss(one)]
        optimizers = [one for one in args if isinstance(one, Optimizer) and not isinstance(one, StrategyOptimizer)]
        if len(models) > 1:
            raise ConflictError(f"prepare got {len(models)} models, and {ONE_MODEL}")
        wrapped: dict[int, Any] = {}
        if optimizers:
            prepared = self._set_up(models[0] if models else self._model_of(optimizers), optimizers)
            wrapped = {id(one): StrategyOptimizer(one, prepared) for one in optimizers}
        return super().prepare(*(wrapped.get(id(one), one) for one in args), device_placement=device_placement)

    def _model_of(self, optimizers: Sequence[Optimizer]) -> Module:
        """Return the model that was prepared before its optimizers.

        Raises:
            MisuseError: None was, or another one is trained.
        """
        parameters = {
            id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
        }
        trained = self._prepared if self._prepared is not None and self._prepared.is_trained else None
        for prepared in self._preparations:
            if parameters <= {id(one) for one in (*prepared.replaced_names, *prepared.model.parameters())}:
                if prepared is trained:
                    break
                if trained is not None:
                    raise MisuseError(
                        f"prepare got an optimizer of {type(prepared.model).__name__}, and "
                        f"{type(trained.model).__name__} is trained: {ONE_MODEL}"
                    )
                return prepared.model
        raise MisuseError(
            "prepare got an optimizer without its model, which a strategy may shard: pass the model first, or together "
            "with all of its optimizers"
        )

    @override
    def prepare_model(self, model: Module, device_placement: Any = None, evaluation_mode: bool = False) -> Module:
        if _is_loss(model):
            return model.to(self.device)
        if PreparedModel.of(model) not in self._preparations:
            self._set_up(model, [])
        if not any(one is model for one in self._models):
            self._models.append(model)
        return model

    def _set_up(self, model: Module, optimizers: list[Optimizer]) -> PreparedModel:
        earlier = PreparedModel.of(model)
        names = {one: names_in_groups(one, model) for one in optimizers}
        last = self._prepared
        if optimizers and last is not None and last is not earlier and last.is_trained:
            last.release()
        if optimizers and earlier is not None and earlier in self._preparations and earlier.accepts_optimizers:
            earlier.add_optimizers(names)
            self._prepared, self._strategy = earlier, earlier.strategy
            return earlier
        if earlier is not None:
            earlier.release()
        strategy = self._strategy if last is None else current_session().make_strategy(self.mixed_precision)
        for optimizer in () if strategy.replicates_state else optimizers:
            if optimizer.state and earlier is None:
                raise MisuseError(
                    f"{type(optimizer).__name__} has a state before prepare, of whole parameters, which "
                    f"{type(strategy).__name__} replaces by shards: prepare it before its first step, and load a state "
                    "into what prepare returns; one that begins with a state, as Adagrad does, needs 'ddp'"
                )
        convert = convert_to_fp32 if self.mixed_precision != "no" else _unchanged  # as Accelerate's own models
        if optimizers and strategy.trains_apart and not self._runs_steps:
            raise ConflictError(
                f"processes of {type(strategy).__name__} train different weights, and a loop with Accelerate does "
                "not say when it evaluates and ends, for which they are averaged: use transformers' Trainer, "
                "dstrat.Trainer or dstrat.OwnLoop"
            )
        prepared = PreparedModel(model, strategy, names, convert, earlier, runs_steps=self._runs_steps)
        self._references = [ref(one) for one in (*self._preparations, prepared)]
        # A model that is evaluated beside the trained one, such as the reference of trl's DPOTrainer, has its own.
        if optimizers or last is None or last is earlier or not last.is_trained:
            self._prepared, self._strategy = prepared, strategy
        return prepared

    @override
    def free_memory(self, *objects: Any) -> Any:
        objects = super().free_memory(*objects)
        # transformers' Trainer calls it before each training, and goes on with its model.
        if self._prepared is not None and not self._runs_steps:
            self._prepared, self._strategy = None, current_session().make_strategy(self.mixed_precision)
            release_memory()  # of models, which refer to their preparations, and these to them
        return objects

    # Data, of which several processes may read the same

    @property
    def _num_readers(self) -> int:
        return self._strategy.distributed_sampler_kwargs.get("num_replicas", 1)

    @property
    def _shares_batches(self) -> bool:
        return self._num_readers < self._strategy.world_size

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if not self._shares_batches or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches or self.split_batches:
            raise ConflictError(
                "dispatch_batches and split_batches divide batches among all processes, and some read the same batch "
                f"with {type(self._strategy).__name__}: leave them out"
            )
        _let_readers_count(data_loader, self._strategy.distributed_sampler_kwargs.get("rank", 0))
        sampler, inner = data_loader.sampler, getattr(data_loader.batch_sampler, "sampler", None)
        if isinstance(sampler, torch.utils.data.RandomSampler) and sampler.generator is None:
            # Accelerate gives it one too, where it divides the data: then the order depends on nothing else.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            sampler.generator = torch.Generator().manual_seed(self._strategy.broadcast(seed))
        elif _draws_globally(inner):
            data_loader = _with_sampler(data_loader, _SharedOrder(inner, self._strategy.broadcast))
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._num_readers,
            process_index=self._strategy.distributed_sampler_kwargs.get("rank", 0),
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # its default for an iterable dataset divides batches among all processes
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        begin_epoch = prepared.set_epoch

        def set_epoch(epoch: int) -> None:
            self._strategy.share_random_state()  # from which workers are seeded, and samples may be drawn
            begin_epoch(epoch)

        prepared.set_epoch = set_epoch  # which it calls before it asks its sampler and its workers for anything
        self._dataloaders.append(prepared)
        return prepared

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not self._shares_batches:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not _has_only_tensors(input_data):
            raise ConflictError(
                f"gather_for_metrics gathers only tensors with {type(self._strategy).__name__}, where some processes "
                "have the same values: pass tensors, and leave use_gather_object out"
            )
        self._gathers_once = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._gathers_once = False

    @contextmanager
    @override
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        if self._shares_batches:
            raise ConflictError(
                "split_between_processes divides inputs among all processes, and with "
                f"{type(self._strategy).__name__} some compute the same batch together: prepare a DataLoader of the "
                "inputs instead"
            )
        with super().split_between_processes(inputs, apply_padding) as divided:
            yield divided

    @override
    def gather(self, tensor: Any) -> Any:
        gathered = super().gather(tensor)
        return recursively_apply(self._first_of_each_reader, gathered) if self._gathers_once else gathered

    def _first_of_each_reader(self, gathered: Tensor) -> Tensor:
        """Return the values of one process of those that read the same, in the order of the data."""
        if self._first_readers is None:
            index = self._strategy.distributed_sampler_kwargs.get("rank", 0)
            position = torch.tensor([[index, int(self._strategy.is_first_reader)]], device=self.device)
            readers = super().gather(position).tolist()
            first = {index: rank for rank, (index, is_first) in reversed([*enumerate(readers)]) if is_first}
            self._first_readers = [first[index] for index in sorted(first)]
        values = gathered.chunk(self.num_processes)
        return torch.cat([values[rank] for rank in self._first_readers])

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        if self._shares_batches and self.step_scheduler_with_optimizer and not self.split_batches:
            raise ConflictError(
                f"a prepared scheduler steps once for each process, and with {type(self._strategy).__name__} some read "
                "the same batch: leave the scheduler out of prepare, step it yourself once in an optimizer step, and "
                "give it the number of these steps, without the factor accelerator.num_processes"
            )
        return super().prepare_scheduler(scheduler)

    # Steps

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if "learning_rate" in kwargs:
            raise ConflictError(
                "LOMO steps within the backward pass, and a strategy after it: choose another optimizer"
            )
        steps = self.gradient_accumulation_steps
        self.prepared_model.backward(loss if steps == 1 else loss / steps, **kwargs)

    @contextmanager
    @override
    def no_sync(self, model: Module) -> Iterator[None]:
        with self._strategy.no_backward_sync():
            yield

    @override
    def trigger_sync_in_backward(self, model: Module) -> AbstractContextManager[None]:
        # Accelerate does it inside of DistributedDataParallel, and nothing for other models: ranks would diverge.
        if self._strategy.world_size > 1:
            raise ConflictError(
                "trigger_sync_in_backward averages gradients of forward passes under no_sync, which only Accelerate's "
                "own DDP can: run the last forward pass, and its backward pass, outside of no_sync"
            )
        return nullcontext()

    @contextmanager
    @override
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        if self._strategy.world_size > 1:
            raise ConflictError(
                "join_uneven_inputs lets processes end at different steps, which only Accelerate's own DDP can: leave "
                "it out, and even_batches=True, the default"
            )
        yield

    @contextmanager
    @override
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        with self._strategy.precision_plugin.forward_context():
            device_type = self.device.type
            if handler is None or not torch.is_autocast_enabled(device_type):
                yield
                return
            dtype, options = torch.get_autocast_dtype(device_type), handler.to_kwargs()
            with torch.autocast(device_type, **{"dtype": dtype, **options}):
                yield

    @override
    def unscale_gradients(self, optimizer: Any = None) -> None:
        self.prepared_model.unscale()

    @override
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        if norm_type != 2:
            raise ConflictError(f"clip_grad_norm_ got norm_type={norm_type!r}, and strategies clip by the 2-norm")
        self._check_all(parameters, "clip_grad_norm_")
        norm = self.prepared_model.clip_by_norm(float(max_norm))
        if norm is None and self._strategy.replicates_state:
            return torch.zeros((), device=self.device)  # without gradients, as torch does it
        return norm

    @override
    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        self._check_all(parameters, "clip_grad_value_")
        for optimizer in self._strategy.optimizers:
            self._strategy.clip_gradients(optimizer, clip_value, "value")

    def _check_all(self, parameters: Iterable[Tensor], caller: str) -> None:
        """Refuse to clip the gradients of some parameters, as strategies clip all that are trained."""
        present = set(map(id, parameters))
        trained = (parameter for parameter in self.prepared_model.model.parameters() if parameter.requires_grad)
        if any(id(parameter) not in present for parameter in trained):
            raise ConflictError(
                f"{caller} got some of the trained parameters, and a strategy clips all of them: pass "
                "model.parameters()"
            )

    # State

    @override
    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        prepared = PreparedModel.of(model)
        if prepared is not None:
            return prepared.state_dict()
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        if _has_shards(state, self._has_empty_parameters):
            raise MisuseError(
                f"get_state_dict got {type(model).__name__}, which is no prepared model and has shards of one: pass "
                "the prepared model, and take the tensors of this part by their names"
            )
        return state

    @override
    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        # One process writes the file, and others would read its shards as theirs.
        if _has_shards(obj, self._has_empty_parameters):
            raise MisuseError(
                "accelerator.save got shards, of which each process has others: save what "
                "accelerator.get_state_dict(model) returns, which all processes must call, or take "
                "accelerator.save_state"
            )
        super().save(obj, f, *args, **kwargs)

    @property
    def _has_empty_parameters(self) -> bool:
        """Whether parameters are tensors without elements while they are not gathered, as in DeepSpeed's stage 3."""
        sharded = (prepared for prepared in self._preparations if not prepared.strategy.replicates_state)
        return any(one.numel() == 0 for prepared in sharded for one in prepared.model.parameters())

    def _load_sharded_model(self, models: list[Module], input_dir: str) -> None:
        """Load models before ``load_state`` does, which would load full tensors into shards; collective."""
        if self._prepared is None or self._strategy.replicates_state:
            return
        # Accelerate numbers the files by the order in which models were prepared.
        for index, model in enumerate(models):
            prepared = PreparedModel.of(model)
            if prepared is None:
                continue
            state: dict[str, Any] = {}
            if self.is_main_process:  # whose state is sent to the others
                state = _read_weights(Path(input_dir), index)
            prepared.load_state_dict(state)
        models.clear()  # by which Accelerate knows that they are loaded


def _has_shards(saved: Any, are_empty: bool) -> bool:
    """Return whether there is a sharded tensor in what is saved; where shards are empty, one without elements."""
    if isinstance(saved, Mapping):
        return any(_has_shards(value, are_empty) for value in saved.values())
    if isinstance(saved, list | tuple):
        return any(_has_shards(value, are_empty) for value in saved)
    return isinstance(saved, DTensor) or (are_empty and isinstance(saved, Tensor) and saved.numel() == 0)


def _is_loss(module: Module) -> bool:
    """Return whether a module has no parameters, so that no strategy has to know it."""
    return next(module.parameters(), None) is None


def _read_weights(folder: Path, index: int) -> dict[str, Any]:
    """Return the weights of a model in a folder of ``save_state``."""

    def numbered(name: str) -> Path:
        stem, suffix = name.rsplit(".", 1)
        return folder / (f"{stem}_{index}.{suffix}" if index else name)

    path = numbered(SAFE_WEIGHTS_NAME)
    state: dict[str, Any] = load_file(path) if path.exists() else torch.load(numbered(WEIGHTS_NAME), weights_only=True)
    return state


def _draws_globally(sampler: Any) -> bool:
    """Return whether a sampler may draw its order from the global random state.

    One without a length is that of an iterable dataset, or has no end.
    """
    is_fixed = isinstance(sampler, torch.utils.data.SequentialSampler) or not hasattr(sampler, "__len__")
    return not is_fixed and getattr(sampler, "generator", None) is None


def _with_sampler(data_loader: Any, sampler: torch.utils.data.Sampler[int]) -> Any:
    """Return a copy of a loader with another sampler; the program may go on to use its own."""
    batches, copied = copy.copy(data_loader.batch_sampler), copy.copy(data_loader)
    batches.sampler = sampler
    copied.__dict__["batch_sampler"] = batches  # which a loader does not let be set
    return copied


class _SharedOrder(torch.utils.data.Sampler[int]):
    """The order that the first process has drawn from the global random state; iterating over it is collective.

    Processes that read the same batch may have drawn different numbers before, as stages do that have different
    numbers of layers with dropout.

    Args:
        sampler: The sampler, which has a length.
        broadcast: Returns the value of the first process.
    """

    def __init__(self, sampler: Any, broadcast: Callable[[Any], Any]) -> None:
        self.sampler = sampler
        self._broadcast = broadcast

    def __iter__(self) -> Iterator[int]:
        order: list[int] = self._broadcast(list(self.sampler))
        return iter(order)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class StrategyOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # not imported by mypy
    """An optimizer that steps by its model's strategy, where the accumulated gradients are complete.

    Args:
        optimizer: The program's optimizer.
        prepared: The model.
    """

    def __init__(self, optimizer: Optimizer, prepared: PreparedModel) -> None:
        super().__init__(optimizer, device_placement=False)
        self._prepared = prepared
        self._is_accelerate_prepared = True  # by which an Accelerator knows those that it has prepared

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._prepared.step(self.optimizer, closure)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._prepared.optimizer_state(self.optimizer)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._prepared.load_optimizer_state(self.optimizer, state_dict)


def _unchanged(output: Any) -> Any:
    return output


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(_unchanged, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _let_readers_count(data_loader: Any, index: int) -> None:
    """Seed the workers of a loader by the index of those who read its batches, which the Trainer does by process."""
    begin = data_loader.worker_init_fn
    if isinstance(begin, functools.partial) and "rank" in begin.keywords:
        data_loader.worker_init_fn = functools.partial(begin, rank=index)
