"""A model that a strategy has set up for the loop of another library."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
from collections import OrderedDict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from dstrat.errors import ConflictError, MisuseError
from dstrat.own_loop.steps import FunctionSteps, Settings
from dstrat.parallel.layers import restored_modes
from dstrat.parallel.optimizer_closures import closure_of_computed
from dstrat.parallel.process_group import noting_failed_steps, wait_for_all_ranks
from dstrat_transformers.divided_batches import CalledModule, DividedBatches, divided_batches
from dstrat_transformers.models import (
    base_model,
    generate_alone,
    generate_together,
    is_peft,
    is_pretrained_model,
    learns_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Strategy

_logger = logging.getLogger(__name__)

ONE_MODEL = (
    "an Accelerator trains one model at a time. Give each trained model a DstratAccelerator() of its own, and prepare "
    "one that is not trained by accelerator.prepare_model(model, evaluation_mode=True)"
)
"""Advice of errors about several models."""

_NEED_OPTIMIZERS = (
    "are not averaged over the processes, as its model was prepared without optimizers, as one that is evaluated: let "
    "accelerator.prepare have the model's optimizers too"
)
"""What gradients lack, and advice."""

_SAVING_METHODS = ("save_pretrained", "save")
"""Methods of models of transformers, peft, sentence-transformers and others that write files."""
_MERGING_METHODS = ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")
"""Methods of models of peft that change, or return, the model inside."""

_numbers_of_saves = itertools.count(1)  # of all models of this process, as the name of a wait is used once in a job


class _Replacement:
    """A method that a preparation has put on a model; a copy of the model, or a file of it, has the method before.

    Args:
        function: What runs instead of the method.
        method: The method before, of the model or of the program.
        prepared_model: The preparation.
    """

    def __init__(self, function: Callable[..., Any], method: Callable[..., Any], prepared_model: PreparedModel) -> None:
        functools.update_wrapper(self, method)  # by which libraries read the signature
        self._function, self._method, self.prepared_model = function, method, prepared_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._check_shards("copied")
        return copy.deepcopy(self._method, memo)  # of the copy, which is known already

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_shards("pickled")
        return _unchanged, (self._method,)

    def _check_shards(self, verb: str) -> None:
        if self.prepared_model.has_shards:
            name = type(self.prepared_model.model).__name__
            raise MisuseError(
                f"{name} cannot be {verb}, as each process has shards of it: make another model, and load the state "
                "that accelerator.get_state_dict(model) returns, which all processes must call"
            )


def _unchanged(value: Any) -> Any:
    return value


class PreparedModel:
    """A model with its optimizers in a strategy, from its set-up to :meth:`release`.

    The model stays the object that the program has: its ``forward`` is replaced by one that runs it as a step of the
    strategy, a training step where gradients are enabled.  Optimizers stay too, and get the parameters that the
    strategy has made of the model's.

    Args:
        model: The model; one of transformers or peft gets an HFModule, which knows its layers.
        strategy: The strategy, with its environment set up.
        names: For each optimizer, the result of :func:`names_in_groups`.
        convert_output: Converts the output of each call, as Accelerate does.
        earlier: The model's last preparation, which was released; None for a model that had none.
        runs_steps: Whether the loop trains by :attr:`divided`, where the strategy runs backward passes by itself.

    Attributes:
        convert_output: Converts an output.
        divided: Steps of batches that the strategy divides; None if it does not.
        model: The model.
        replaced_names: Names of the parameters that the strategy may have replaced, as long as something has them.
        module: The module that the strategy has: the model, or the HFModule with it.
        strategy: The strategy.
        optimizers: The program's optimizers.
        names: The names of the parameters in their groups.
        has_full_weights: Whether this process has whole weights in place of its shards, within :meth:`full_weights`.
        is_released: Whether it has ended.
    """

    def __init__(
        self,
        model: Module,
        strategy: Strategy,
        names: Mapping[Optimizer, Sequence[Sequence[str]]],
        convert_output: Callable[[Any], Any],
        earlier: PreparedModel | None = None,
        *,
        runs_steps: bool = False,
    ) -> None:
        self.model, self.strategy, self.optimizers = model, strategy, list(names)
        self.names, self.convert_output, self._is_running = names, convert_output, False
        self._counting: tuple[Any, Any] | None = None  # the model whose num_parameters is replaced, and the earlier one
        self._has_stepped = self.has_full_weights = self._has_unfinished_step = self.is_released = False
        self.module: Any = model
        if learns_prompts(model) and not strategy.replicates_state:
            raise ConflictError(
                f"{type(model).__name__} learns prompts, which peft computes from whole parameters where it saves "
                f"them, and {type(strategy).__name__} has shards of these: choose 'ddp'"
            )
        if earlier is not None:
            self.module = earlier.module  # a strategy may have parked its shards
        elif is_pretrained_model(model) or is_peft(model):
            with restored_modes(model):  # which are the program's
                self.module = CalledModule(model)
        if isinstance(self.module, CalledModule):
            self.module.joins_logits = True  # until the new loop says that it reads none
        # transformers' Trainer enters evaluation_context itself.
        self._shares_buffers = not runs_steps and strategy.world_size > 1 and _has_saved_buffers(model)
        # Of a model that was sharded before, a process may have no elements of a parameter.
        sizes = {name: parameter.numel() for name, parameter in base_model(model).named_parameters()}
        known = {} if earlier is None else earlier._num_elements  # noqa: SLF001 - of this class
        self._num_elements: dict[str, int] = {name: size or known.get(name, 0) for name, size in sizes.items()}
        self._tied: list[list[str]] = _tied_names(model) if earlier is None else earlier._tied  # noqa: SLF001 - likewise
        self.replaced_names = WeakIdKeyDictionary({p: name for name, p in model.named_parameters()})
        strategy.connect(self.module)
        if isinstance(self.module, CalledModule):
            self.module.prepare(strategy)
        strategy.step_methods = FunctionSteps
        make_optimizers = self._with_new_parameters if names else None
        try:
            strategy.setup(Settings(strategy=strategy, make_optimizers=make_optimizers))
        except MisuseError as error:
            if earlier is None:
                raise
            name = type(model).__name__
            raise MisuseError(
                f"{name} was prepared before, such as by another Trainer, and {type(strategy).__name__} cannot set it "
                f"up again: save it, as trainer.save_model(folder) does, and pass a new one, such as "
                f"{name}.from_pretrained(folder). The reason: {error}"
            ) from error
        if names:
            strategy.check_set_up()
        else:
            self._refuse_foreign_steps()
        self._runs_steps = runs_steps
        self.divided = self._divided_batches()
        self._forward, self._changed = model.forward, {"forward": model.__dict__.get("forward")}

        # On the instance, as Accelerate itself does it for autocast: the model's class and hooks stay.
        model.forward = _Replacement(self._run, self._forward, self)  # which lives as long as the model
        if not strategy.replicates_state:
            self._replace_methods(model)

    def _refuse_foreign_steps(self) -> None:
        """Refuse optimizers that were not prepared with the model, which nothing would synchronize."""
        if self.strategy.world_size == 1:
            return
        reference = ref(self)  # the hooks of optimizer steps outlive a model

        def untrained_parameters() -> dict[str, Tensor]:
            prepared = reference()
            return {} if prepared is None or prepared.is_trained else dict(prepared.model.named_parameters())

        strategy: Any = self.strategy  # one of several processes, all of which derive from ParallelStrategy
        strategy.refuse_steps(untrained_parameters, f"whose gradients {_NEED_OPTIMIZERS}")

    def _divided_batches(self) -> DividedBatches | None:
        num_optimizers = len(self.strategy.optimizers)
        return divided_batches(self.module, self.strategy, runs_steps=self._runs_steps, num_optimizers=num_optimizers)

    @property
    def accepts_optimizers(self) -> bool:
        """Whether a model that was prepared for evaluations can be trained as it is set up: it is sharded already."""
        strategy = self.strategy
        is_sharded = not strategy.replicates_state and strategy.allows_new_optimizers
        return not self.is_trained and is_sharded and strategy.saved_activations is None

    def add_optimizers(self, names: Mapping[Optimizer, Sequence[Sequence[str]]]) -> None:
        """Train a model that was prepared for evaluations.

        Args:
            names: For each optimizer, the result of :func:`names_in_groups`.
        """
        self.optimizers, self.names = list(names), names
        self.strategy.setup_optimizers(Settings(strategy=self.strategy, make_optimizers=self._with_new_parameters))
        self.divided = self._divided_batches()

    @staticmethod
    def of(model: Any) -> PreparedModel | None:
        """Return the preparation of a model; None if no strategy has set it up."""
        return getattr(model.__dict__.get("forward"), "prepared_model", None)  # also below another library's wrapper

    def _replace_methods(self, model: Any) -> None:
        self._count_all_parameters(base_model(model))
        generate_together(model)
        if hasattr(model, "generate"):
            self._generate_in_a_step(model)
        for name in _MERGING_METHODS if is_peft(model) else ():
            if callable(getattr(model, name, None)):
                self._refuse_to_merge(model, name)
        for name in _SAVING_METHODS:
            if inspect.ismethod(getattr(model, name, None)):  # and not a layer of that name
                self._save_full_weights(model, name)

    def _count_all_parameters(self, base: Any) -> None:
        """Let ``num_parameters`` of a model of transformers count those, too, of which this process has no elements."""
        if not is_pretrained_model(base):
            return
        count, self._counting = base.num_parameters, (base, base.__dict__.get("num_parameters"))

        def count_all(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
            layers = base.named_modules() if exclude_embeddings else ()
            embeddings = {f"{name}.weight" for name, layer in layers if isinstance(layer, nn.Embedding)}
            missing = sum(
                self._num_elements.get(name, 0)
                for name, parameter in base.named_parameters()
                if not parameter.numel() and (parameter.requires_grad or not only_trainable) and name not in embeddings
            )
            number: int = count(only_trainable, exclude_embeddings) + missing
            return number

        base.num_parameters = _Replacement(count_all, count, self)

    def _generate_in_a_step(self, model: Any) -> None:
        """Let ``generate`` run as one step, as it also calls layers alone: an encoder, or the model inside peft's."""
        generate = model.generate
        self._changed["generate"] = model.__dict__.get("generate")

        def generate_in_a_step(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return generate(*args, **kwargs)
            self._check_has_shards("generate")
            self._is_running = True
            try:
                if self.divided is not None:
                    return self.divided.generate(generate, *args, **kwargs)
                return self.strategy.validation_step(lambda _: generate(*args, **kwargs), None)
            finally:
                self._is_running = False
                self.strategy.accelerator.end_graph("evaluation_step")

        model.generate = _Replacement(generate_in_a_step, generate, self)

    def _refuse_to_merge(self, model: Any, name: str) -> None:
        method = getattr(model, name)
        self._changed[name] = model.__dict__.get(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if self.has_shards:
                raise MisuseError(
                    f"{name} changes whole weights, and each process has shards of them: save the adapters, load them "
                    f"into a model that is not prepared, and call {name} there"
                )
            return method(*args, **kwargs)

        setattr(model, name, _Replacement(refuse, method, self))

    def _save_full_weights(self, model: Any, name: str) -> None:
        """Let a method that writes the model's files see whole weights, in the first process; it becomes collective."""
        save = getattr(model, name)
        self._changed[name] = model.__dict__.get(name)

        def save_full_weights(*args: Any, **kwargs: Any) -> Any:
            # A program that passes the gathered state itself may call it in one process only.
            if self.has_full_weights or kwargs.get("state_dict") is not None:
                return save(*args, **kwargs)
            with self.full_weights() as has_them:
                return save(*args, **kwargs) if has_them else None

        setattr(model, name, _Replacement(save_full_weights, save, self))

    def _with_new_parameters(self, _: Module) -> list[Optimizer]:
        """Return the optimizers with the parameters that the model has now, by name."""
        parameters = dict(self.model.named_parameters())
        for optimizer, names in self.names.items():
            for group, names_of_group in zip(optimizer.param_groups, names, strict=True):
                group["params"] = [parameters[name] for name in names_of_group]
        return self.optimizers

    @property
    def has_shards(self) -> bool:
        """Whether this process has shards of the model's parameters, unless whole ones are in their place now."""
        if self.strategy.replicates_state or self.has_full_weights:
            return False
        parameters = list(self.model.parameters())
        return any(isinstance(one, DTensor) or one.is_meta or not one.numel() for one in parameters)

    def _check_has_shards(self, name: str) -> None:
        """Check that this process does not save whole weights now, and would wait for the shards of others for ever."""
        if self.has_full_weights:
            raise MisuseError(
                f"{name} of {type(self.model).__name__} was called by the first process alone, while it saves the "
                "model, and each process has shards of the weights: call it in all processes, before they save"
            )

    @property
    def is_trained(self) -> bool:
        """Whether the model was set up with optimizers."""
        return bool(self.optimizers)

    # Steps

    @noting_failed_steps()
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's ``forward`` as a step."""
        if self._is_running:  # called by itself, or by the strategy
            return self._forward(*args, **kwargs)
        self._check_has_shards("forward")
        is_training = self.is_trained and torch.is_grad_enabled()
        run_step = self.strategy.training_step if is_training else self.strategy.validation_step
        self._is_running = True
        try:
            if self.divided is not None:
                output = self.divided.call(*args, is_training=is_training, **kwargs)
            else:
                # Keyword arguments are the batch of a step, as a strategy may cast one.
                output = run_step(lambda batch: self._forward(*args, **batch), kwargs)
        finally:
            self._is_running = False
        if not is_training:
            self.strategy.accelerator.end_graph("evaluation_step")
        return self.convert_output(output)

    @noting_failed_steps()
    def train(self, *args: Any) -> Tensor:
        """Run a training step of batches that the strategy divides, with its backward passes, and return its loss."""
        assert self.divided is not None  # noqa: S101 - or the caller computes the loss
        self._is_running = self._has_unfinished_step = True
        try:
            loss = self.divided.train(*args)
            self._has_unfinished_step = False
            return loss
        finally:
            self._is_running = False
            self.strategy.accelerator.end_graph("backward")

    @noting_failed_steps()
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss.

        Raises:
            MisuseError: The model has no optimizers, several processes, and parameters that get gradients.
        """
        is_checked = not self.is_trained and self.strategy.world_size > 1
        if is_checked and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise MisuseError(f"backward got a loss, and gradients of {type(self.model).__name__} {_NEED_OPTIMIZERS}")
        self.strategy.backward(loss, **kwargs)
        self.strategy.accelerator.end_graph("backward")

    def unscale(self) -> None:
        """Undo a loss scale in the gradients."""
        for optimizer in self.strategy.optimizers:
            self.strategy.unscale_gradients(optimizer)

    @noting_failed_steps()
    def clip_by_norm(self, limit: float) -> Tensor | None:
        """Clip all gradients to a norm, and return their norm before; collective.

        Returns:
            The norm; None where only the strategy's step knows it.
        """
        self.unscale()
        optimizers = self.strategy.optimizers
        if self.divided is not None and self.divided.has_stages:  # of which this process has the gradients of one
            return self.strategy.clip_gradients(optimizers[0], limit)
        norm = _total_norm(self.model.parameters())
        unowned = self._gradients_without_optimizer()
        if norm is not None and (len(optimizers) > 1 or unowned):  # an optimizer's own norm would be smaller
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            for optimizer in optimizers:
                self.strategy.scale_gradients(optimizer, factor)
            for gradient in unowned:  # to which later backward passes add
                gradient.mul_(factor.to(gradient.device))
        elif not math.isinf(limit):
            for optimizer in optimizers:
                self.strategy.clip_gradients(optimizer, limit)
        return norm

    def _gradients_without_optimizer(self) -> list[Tensor]:
        """Return the gradients of parameters that no optimizer has, which count in a norm."""
        # By name too, as a strategy may have other tensors in the groups; and groups may have been added since.
        known = {name for names in self.names.values() for names_of_group in names for name in names_of_group}
        groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        trained = {id(parameter) for parameters in groups for parameter in parameters}
        return [
            parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and name not in known and id(parameter) not in trained
        ]

    @noting_failed_steps()
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step one of the program's optimizers; the closure computes the loss again, for those that need it.

        Raises:
            MisuseError: The loss depends on no shard of the model, or another one is trained.
        """
        if self.is_released:
            raise MisuseError(
                f"{type(optimizer).__name__} steps {type(self.model).__name__}, which it trains no longer, as another "
                "model was prepared with optimizers, or this one again with others: step those that the last prepare "
                f"returned; {ONE_MODEL}"
            )
        if not self._has_stepped and closure is None:
            self._check_gradients()
        self._has_stepped = True
        stepped = self._stepped(optimizer)
        closure = closure or closure_of_computed(
            stepped, "pass its step a closure that clears gradients, computes the loss, and calls accelerator.backward"
        )
        self.strategy.optimizer_step(stepped, closure, self.strategy.model)
        self.strategy.accelerator.end_graph("optimizer_step")
        if self._shares_buffers:
            # Here, where all ranks are, and not in an evaluation: one rank alone may run the model, to show samples.
            with self.strategy.evaluation_context():
                pass

    def _check_gradients(self) -> None:
        """Refuse a model that computes with references to its first parameters, which shards have replaced."""
        shards = [one for one in self.model.parameters() if isinstance(one, DTensor) and one.requires_grad]
        if shards and all(shard.grad is None for shard in shards):
            raise MisuseError(
                f"no parameter of {type(self.model).__name__} got a gradient. If a backward pass ran before this step, "
                "its forward pass must read parameters from its layers, where the strategy puts the gathered ones, and "
                "not hold tensors itself, as models of Keras do: choose 'ddp' for it"
            )

    def _stepped(self, optimizer: Optimizer) -> Optimizer:
        """Return the strategy's optimizer for one of the program's, which it may have replaced."""
        return self.strategy.optimizers[next(i for i, one in enumerate(self.optimizers) if one is optimizer)]

    # State, by the names that the program knows

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of the model; of a strategy that shards it on global rank 0 only; collective.

        Tied weights share memory, by which libraries save them once, if the state is an OrderedDict.
        """
        state = self.strategy.module_state_dict()
        full = OrderedDict((name.removeprefix(self._prefix), value) for name, value in state.items())
        for first, *later in self._tied:
            full.update({name: full[first] for name in later if name in full and first in full})
        return full

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a full state of the model, of which that of global rank 0 counts; collective."""
        full = self.with_tied(state)
        self.strategy.load_module_state_dict({self._prefix + name: value for name, value in full.items()})

    def with_tied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with all names of tied weights, of which a file may have one."""
        full = dict(state)
        for names in self._tied:
            saved = [state[name] for name in names if name in state]
            for name in names if saved else ():
                full.setdefault(name, saved[0])
        return full

    @contextmanager
    def intercepted_loading(self) -> Iterator[dict[str, Any]]:
        """Let the model's ``load_state_dict`` only keep what it gets, as hooks of shards do not know whole weights.

        Yields:
            The tensors that code in this context has loaded.
        """
        loaded: dict[str, Any] = {}
        earlier = self.model.__dict__.get("load_state_dict")

        def load_state_dict(state: Mapping[str, Any], *_: Any, **__: Any) -> Any:
            loaded.update(state)
            return SimpleNamespace(missing_keys=[], unexpected_keys=[])

        self.model.__dict__["load_state_dict"] = load_state_dict
        try:
            yield loaded
        finally:
            del self.model.__dict__["load_state_dict"]
            if earlier is not None:
                self.model.__dict__["load_state_dict"] = earlier

    @contextmanager
    def full_weights(self) -> Iterator[bool]:
        """Put whole weights on the CPU into the model of global rank 0, for code that saves it; collective.

        Yields:
            Whether this process has them.
        """
        wait_for_all_ranks(f"save {type(self.model).__name__} (save {next(_numbers_of_saves)}), which all must call")
        state = self.state_dict()
        has_them = self.strategy.is_global_zero
        shards = _replace_parameters(self.model, state) if has_them else []
        self.has_full_weights = has_them
        try:
            yield has_them
        finally:
            self.has_full_weights = False
            for layer, name, shard in shards:
                setattr(layer, name, shard)
            self.strategy.barrier("save")  # also after an error of the first process, which the program may catch

    @property
    def _prefix(self) -> str:
        return "" if self.module is self.model else "model."

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer as its ``state_dict`` has it; collective if the strategy shards it."""
        if self.strategy.replicates_state:
            return optimizer.state_dict()
        return self.strategy.optimizer_state(self._stepped(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full state of an optimizer, as its ``state_dict`` has it; collective."""
        self.strategy.load_optimizer_state(self._stepped(optimizer), state)
        if optimizer is self.optimizers[0]:  # once in a resumption
            self._resume_strategy()

    def _resume_strategy(self) -> None:
        """Let the strategy know of a resumption from files of another library, which do not have its state."""
        state = self.strategy.state_dict()
        if not state:
            self.strategy.load_state_dict(state)  # in which a strategy warns of what no checkpoint has
        elif self.strategy.is_global_zero:
            _logger.warning(
                "%s resumes without its own state, which this checkpoint lacks", type(self.strategy).__name__
            )

    # The end

    def release(self) -> None:
        """Give the model back its methods, and end the strategy, without the communication of the program."""
        for name, method in self._changed.items():  # which the program may have put on the instance, as trl does
            self.model.__dict__.pop(name, None)
            if method is not None:
                self.model.__dict__[name] = method
        if self._counting is not None:
            base, count = self._counting
            del base.num_parameters
            if count is not None:
                base.num_parameters = count
        generate_alone(self.model)
        self.is_released = True
        if isinstance(self.module, CalledModule):
            self.module.teardown("fit")
        # It belongs to the session, and other strategies use it.
        self.strategy.close_communication = lambda **_: None  # type: ignore[attr-defined]
        if self._has_unfinished_step:  # of which other stages receive nothing more
            self.strategy.on_exception(RuntimeError(f"a training step of {type(self.model).__name__} has not ended"))
        self.strategy.teardown()


def _has_saved_buffers(model: Module) -> bool:
    """Return whether files have buffers of a model; others, such as rotary frequencies, follow from its config."""
    names = {name for name, _ in model.named_buffers()}
    return bool(names) and not names.isdisjoint(model.state_dict())


def _tied_names(model: Module) -> list[list[str]]:
    """Return the names of each parameter that has several in the state of a model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of_parameter for of_parameter in names.values() if len(of_parameter) > 1]


def _replace_parameters(model: Module, state: Mapping[str, Tensor]) -> list[tuple[Module, str, Parameter]]:
    """Replace the parameters of a model by those of its full state, tied ones by one; return what was there."""
    replaced, made = [], {}
    for path, layer in model.named_modules(remove_duplicate=False):
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            value = state.get(f"{path}.{name}" if path else name)
            if value is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                replaced.append((layer, name, parameter))
    for layer, name, parameter in replaced:
        setattr(layer, name, made[id(parameter)])
    return replaced


def names_in_groups(optimizer: Optimizer, model: Module) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer, also of those before a preparation.

    Args:
        optimizer: The optimizer.
        model: Its model.

    Raises:
        MisuseError: The model does not have one of them.
    """
    earlier = PreparedModel.of(model)
    names = WeakIdKeyDictionary({} if earlier is None else earlier.replaced_names)
    names.update({parameter: name for name, parameter in model.named_parameters()})
    # After a step that failed, parameters may be gathered still; groups may have been added since.
    known = [] if earlier is None else earlier.names.get(optimizer, [])
    groups = [group["params"] for group in optimizer.param_groups]
    try:
        return [
            list(known[index])
            if index < len(known) and len(known[index]) == len(parameters)
            else [names[parameter] for parameter in parameters]
            for index, parameters in enumerate(groups)
        ]
    except KeyError:
        raise MisuseError(
            f"{type(optimizer).__name__} has a parameter that {type(model).__name__} does not have: prepare a model "
            "together with the optimizers of its parameters"
        ) from None


@torch.no_grad()
def _total_norm(parameters: Iterable[Parameter]) -> Tensor | None:
    """Return the norm of all gradients, of sharded ones over their ranks; collective; None without gradients."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
    full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor | None = torch.linalg.vector_norm(torch.stack(full)) if len(full) > 1 else next(iter(full), None)
    return total
