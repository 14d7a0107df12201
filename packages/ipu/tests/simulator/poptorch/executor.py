"""A compiled model: its weights are on the device, and one call consumes several batches.

After graphcore/poptorch, python/_poplar_executor.py (3.3): freezing of options, wrapping of the user's model,
implicit copies of weights, optimizer state, attaching and detaching.  Shapes of outputs are those of
poptorch/source/PoplarExecutable.cpp (``popartBatchDimForAnchor``).
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from . import hardware
from .errors import Error, poptorch_error
from .hardware import counts
from .ops import Trace
from .optim import DeviceOptimizer, Optimizer, as_dict
from .options import ConnectionType, Options, OutputMode, PipelinedExecution, ReductionType, ShardedExecution
from .tape import Tape

NO_EXECUTABLE = "Model has not been compiled or has been destroyed."


class PoplarExecutor:
    """What trainingModel and inferenceModel return."""

    def __init__(self, model, options, *, training, optimizer=None, user_model=None):
        if options is not None and not isinstance(options, Options):
            raise poptorch_error(f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)")
        if options is not None:
            options._freeze()
        options = Options() if options is None else options.clone()
        self._model, self._user_model, self._training = model, user_model or model, training
        if options.defaultOutputMode():
            options.outputMode(OutputMode.Final if training else OutputMode.All)
        if training and optimizer is None:
            optimizer = torch.optim.SGD(self._user_model.parameters(), lr=0.01)
        if not training and options.Training.gradient_accumulation != 1:
            raise poptorch_error(
                "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value "
                "(1) when running a poptorch.inferenceModel()."
            )
        self._options = options
        self._executable = None
        self._is_attached = self._dirty_host_weights = self._ipu_optimizer_is_dirty = False
        self._host_weights_version = 0
        self._optimizer, self._dict_optimizer = optimizer, {}
        self._cached_rng_state = [options.random_seed] if options.exists("random_seed") else None
        if optimizer is not None:
            self.setOptimizer(optimizer)
        options._freeze()
        if training:
            self._wrap()

    # The user's model, which copies weights from the device when somebody looks at them

    def _wrap(self):
        parent = weakref.ref(self)

        def copy_if_needed():
            executor = parent()
            return executor is not None and executor.copyWeightsToHostIfNeeded()

        class PoptorchModel(type(self._user_model)):
            _simulated_parent = parent

            def copyWeightsToHostIfNeeded(self):
                return copy_if_needed()

            def __getattribute__(self, name):
                if name == "_host_weights_version":
                    executor = parent()
                    return None if executor is None else executor._host_weights_version
                if name in ("_buffers", "_parameters", "forward"):
                    copy_if_needed()
                return object.__getattribute__(self, name)

        class PoptorchParameter(torch.nn.Parameter):
            def __getattribute__(self, name):
                copy_if_needed()
                return object.__getattribute__(self, name)

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                copy_if_needed()
                return super().__torch_function__(func, types, args, kwargs or {})

            def __reduce_ex__(self, protocol):
                raise poptorch_error("a parameter of a wrapped model would be loaded where there is poptorch only")

        class PoptorchBuffer(torch.Tensor):
            def __getattribute__(self, name):
                copy_if_needed()
                return super().__getattribute__(name)

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                copy_if_needed()
                return super().__torch_function__(func, types, args, kwargs or {})

            __reduce_ex__ = PoptorchParameter.__reduce_ex__

        PoptorchModel.__name__ = f"Poptorch{type(self._user_model).__name__}"
        for parameter in self._user_model.parameters():
            parameter.__class__ = PoptorchParameter
        for buffer in self._user_model.buffers():
            if type(buffer) is not torch.Tensor:
                raise poptorch_error(f"All buffers must be an instance of torch.Tensor (Got {type(buffer)})")
            buffer.__class__ = PoptorchBuffer
        self._user_model.__class__ = PoptorchModel

    def _unwrap(self):
        base = type(self._user_model).__mro__[1]
        self._user_model.__class__ = base
        for parameter in self._user_model.parameters():
            if type(parameter).__name__ == "PoptorchParameter":
                parameter.__class__ = torch.nn.Parameter
        for buffer in self._user_model.buffers():
            if type(buffer).__name__ == "PoptorchBuffer":
                buffer.__class__ = torch.Tensor

    def __getattr__(self, name):
        return getattr(self.__dict__["_user_model"], name)

    @property
    def model(self):
        """The user's model."""
        return self._user_model

    @property
    def options(self):
        """A frozen copy of the options."""
        return self._options

    def isCompiled(self):
        return self._executable is not None

    def isAttachedToDevice(self):
        return self.isCompiled() and self._is_attached

    def _check_compiled(self):
        if not self.isCompiled():
            raise poptorch_error(NO_EXECUTABLE)

    def _host_tensors(self):
        with torch._C.DisableTorchFunctionSubclass():
            named = [*self._model.named_parameters(), *self._model.named_buffers()]
            return {name: tensor.detach() for name, tensor in named}

    def copyWeightsToHostIfNeeded(self):
        if self._dirty_host_weights:
            self.copyWeightsToHost()
            return True
        return False

    def copyWeightsToHost(self):
        self._check_compiled()
        self._dirty_host_weights = False
        for name, tensor in self._host_tensors().items():
            tensor.copy_(self._executable.weight(name))
        counts.weights_to_host += 1
        self._host_weights_version += 1

    def copyWeightsToDevice(self):
        self._check_compiled()
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()  # which reads the state that the device has, where it is newer
        self._executable.take_weights(self._host_tensors())
        counts.weights_to_device += 1

    def load_state_dict(self, state_dict, strict=True):
        loaded = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return loaded

    # The optimizer

    def setOptimizer(self, optimizer):
        if self.isCompiled() and optimizer is not self._optimizer:
            self._read_state_if_needed()
            if isinstance(self._optimizer, Optimizer):
                self._optimizer.state_dict = self._optimizer.get_state_dict
            if isinstance(optimizer, Optimizer):
                optimizer.ipu_state_is_dirty = True
        self._optimizer = optimizer
        if isinstance(optimizer, Optimizer):
            optimizer.state_dict = self._state_of_optimizer
        values = as_dict(optimizer)
        if values != self._dict_optimizer:
            self._dict_optimizer, self._ipu_optimizer_is_dirty = values, True
        if self.isAttachedToDevice():
            self._update_optimizer_if_needed()
            self._write_state_if_needed()

    def _update_optimizer_if_needed(self):
        if self._ipu_optimizer_is_dirty:
            self._executable.optimizer.update(self._dict_optimizer)
            self._ipu_optimizer_is_dirty = False
            counts.optimizer_updates += 1

    def _state_of_optimizer(self):
        self._read_state_if_needed()
        return self._optimizer.get_state_dict()

    def _read_state_if_needed(self):
        if isinstance(self._optimizer, Optimizer) and self._optimizer.host_state_is_dirty:
            self._check_compiled()
            own = torch.optim.Optimizer.state_dict(self._optimizer)
            self._optimizer.set_state_dict({**self._executable.optimizer.read(), **own})
            self._optimizer.ipu_state_is_dirty = False
            counts.state_to_host += 1

    def _write_state_if_needed(self):
        if isinstance(self._optimizer, Optimizer) and self._optimizer.ipu_state_is_dirty:
            assert not self._optimizer.host_state_is_dirty, "Both host and ipu states cannot be dirty at the same time."
            if self._optimizer.has_state():
                self.copyWeightsToHostIfNeeded()
                self._executable.optimizer.write(self._optimizer.get_state_dict())
                counts.state_to_device += 1
            self._optimizer.ipu_state_is_dirty = False

    # Attaching

    def _on_attach(self):
        hardware.acquire(id(self), self._executable.num_ipus)
        self._is_attached = True
        self.copyWeightsToDevice()
        if self._optimizer is not None:
            self._update_optimizer_if_needed()
        if isinstance(self._optimizer, Optimizer):
            if self._optimizer.has_state():
                self._optimizer.ipu_state_is_dirty = True
                self._write_state_if_needed()
            else:
                self._optimizer.host_state_is_dirty, self._optimizer.ipu_state_is_dirty = True, False
        if self._cached_rng_state is not None:
            self._executable.set_rng_state(self._cached_rng_state)

    def attachToDevice(self):
        self._check_compiled()
        if self._is_attached:
            raise poptorch_error("Device is already attached")
        self._on_attach()

    def detachFromDevice(self):
        self._check_compiled()
        if self._training:
            self.copyWeightsToHostIfNeeded()
        if not self._is_attached:
            raise poptorch_error("Device is not attached")
        self._read_state_if_needed()
        self._cached_rng_state = self._executable.rng_state
        hardware.release(id(self))
        self._is_attached = False

    @property
    def rng_state(self):
        """The state of the device's random numbers, a list of integers."""
        self._check_compiled()
        return self._executable.rng_state if self._is_attached else self._cached_rng_state

    @rng_state.setter
    def rng_state(self, state):
        self._check_compiled()
        self._cached_rng_state = state
        if self._is_attached:
            self._executable.set_rng_state(state)

    def destroy(self):
        if not self.isCompiled():
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_state_if_needed()
        hardware.release(id(self))
        self._executable, self._is_attached = None, False
        if self._training:
            self._unwrap()

    # Running

    def compile(self, *args):
        if not self.isCompiled():
            self._compile(args)

    def _compile(self, args):
        counts.compilations += 1
        self._executable = Executable(self, args)
        if self._options.connection_type is not ConnectionType.Never:
            try:
                self._on_attach()
            except Error:
                self._executable = None
                raise

    def __call__(self, *args):
        if self._options.connection_type is ConnectionType.Never:
            raise AssertionError("Trying to run a model on an offline device (ConnectionType.Never)")
        if not self.isCompiled():
            self._compile(args)
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._take_trained_weights()
        outputs = self._executable.run(args)
        counts.calls += 1
        if self._training:
            self._dirty_host_weights = True
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.host_state_is_dirty = True
        return outputs

    def _take_trained_weights(self):
        copy_if_needed = getattr(self._user_model, "copyWeightsToHostIfNeeded", None)
        if callable(copy_if_needed):
            copy_if_needed()
            if self._host_weights_version != self._user_model._host_weights_version:
                self.copyWeightsToDevice()
                self._host_weights_version = self._user_model._host_weights_version


class Executable:
    """A graph of static shapes, and what is on the devices that it runs on."""

    def __init__(self, executor, args):
        options = executor._options
        self._training = executor._training
        self._iterations, self._replicas = options.device_iterations, options.replication_factor
        self._accumulation = options.Training.gradient_accumulation
        self._mode, self._period = options.output_mode, options.output_return_period
        self._scale = (
            1.0 / (self._replicas * self._accumulation) if options.Training.reduction is ReductionType.Mean else 1.0
        )
        leaves, self._spec = _leaves(args)
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in leaves]
        factor = self._iterations * self._replicas * self._accumulation
        for tensor in leaves:
            size = tensor.shape[0] if tensor.dim() else 1
            assert size % factor == 0, (
                f"Invalid batch dimension: In the input {tensor.shape}, the batch dimension ({size}) must be a "
                f"multiple of Options.deviceIterations({self._iterations}) * Options.replicationFactor("
                f"{self._replicas}) * Options.Training.gradientAccumulation({self._accumulation}) = {factor}"
            )
        host = executor._host_tensors()
        buffers = {name for name, _ in executor._model.named_buffers()}
        self._weights = {name: tensor.clone() for name, tensor in host.items() if name not in buffers}
        copies = {name: tensor.clone() for name, tensor in host.items() if name in buffers}
        self._buffers = [{n: t.clone() for n, t in copies.items()} for _ in range(self._replicas)]
        with torch._C.DisableTorchFunctionSubclass():
            named = {
                name: (parameter.requires_grad, id(parameter)) for name, parameter in executor._model.named_parameters()
            }
        self._trained = [name for name, (requires, _) in named.items() if requires]
        self.rng_state = [torch.initial_seed() % 2**63]
        trace = self._trace(executor, [tensor[: len(tensor) // factor] for tensor in leaves])
        self.num_ipus = hardware.rounded(trace.num_ipus * self._replicas, auto_round=bool(options.auto_round_num_ipus))
        self._check_pipeline(options._execution_strategy, trace)
        if self._training:
            by_id = {identity: name for name, (_, identity) in named.items()}
            groups = [[by_id[id(p)] for p in group["params"]] for group in executor._optimizer.param_groups]
            self.optimizer = DeviceOptimizer(executor._dict_optimizer, groups, self._weights)

    def _check_pipeline(self, strategy, trace):
        """Refuse fewer batches than a pipeline has stages (docs/user_guide/overview.rst; PopART checks it)."""
        if trace.num_stages == 1 or isinstance(strategy, ShardedExecution):
            return
        assert isinstance(strategy, PipelinedExecution)
        stages = 2 * trace.num_stages - 1 if self._training else trace.num_stages
        given, name = (
            (self._accumulation, "Options.Training.gradientAccumulation")
            if self._training
            else (self._iterations, "Options.deviceIterations")
        )
        if given < stages:
            raise Error(f"{name}({given}) must be at least the number of pipeline stages ({stages})")

    def _trace(self, executor, leaves):
        """Run the model's Python once, with the first micro-batch, and keep the graph."""
        names, buffer_names = list(self._weights), list(self._buffers[0])
        inputs = [
            *(self._weights[name].clone() for name in names),
            *(self._buffers[0][name].clone() for name in buffer_names),
            *(tensor.clone() for tensor in leaves),
        ]
        if any(tensor.requires_grad for tensor in leaves):
            raise poptorch_error("An input tensor to an IPU model can not have requires_grad set to True")
        trace = Trace(executor._options._execution_strategy)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), Tape(inputs) as tape, trace:
            given = iter(inputs)
            weights = {name: next(given).detach() for name in names}
            for name in self._trained if self._training else ():
                weights[name].requires_grad_()
            state = {**weights, **{name: next(given) for name in buffer_names}}
            args = pytree.tree_unflatten(list(given), self._spec)
            outputs = functional_call(executor._model, state, args)
            flat, self._output_spec = pytree.tree_flatten(outputs)
            if not all(isinstance(one, torch.Tensor) for one in flat):
                raise Error("Every output of a model must be a tensor, or a list, tuple or dict of tensors")
            self._on_host = [tape.is_on_host(one) for one in flat]
            if any(self._on_host):
                warnings.warn("Output expected to be on the IPU but is on cpu", stacklevel=1)
            gradients = self._gradients(trace, flat, [weights[name] for name in self._trained])
        if not self._training:
            self._num_outputs = len(flat)
        self._graph = tape.finish([*flat, *gradients])
        self._num_outputs, self._names, self._buffer_names = len(flat), names, buffer_names
        return trace

    def _gradients(self, trace, outputs, weights):
        if not self._training:
            return []
        losses = [*trace.losses, *trace.final]  # each of torch's losses is an identity loss too
        if not losses:
            raise Error("Couldn't find a loss in graph!")
        independent = [one for one in losses if not any(_feeds(one, other) for other in losses if other is not one)]
        if len(independent) != 1:
            raise Error(
                "Multiple independent losses found in graph. Graph must have one final loss. "
                "Wrap final graph loss in poptorch.identityLoss."
            )
        if not any(one is independent[0] for one in outputs):
            raise Error("the loss is not among the model's outputs: a training model must return it")
        return torch.autograd.grad(independent[0], weights, allow_unused=True)

    def weight(self, name):
        """Return a weight or buffer on the device, of the first replica."""
        return self._weights[name] if name in self._weights else self._buffers[0][name]

    def take_weights(self, host):
        """Copy weights and buffers from the host."""
        for copies in (self._weights, *self._buffers):
            for name, tensor in copies.items():
                tensor.copy_(host[name])

    def set_rng_state(self, state):
        """Let the device draw other random numbers."""
        self.rng_state = list(state)

    def run(self, args):
        """Run the graph for each micro-batch, and step after each group of them."""
        leaves, spec = _leaves(args)
        if spec != self._spec or [(tensor.shape, tensor.dtype) for tensor in leaves] != self._shapes:
            shapes = [tuple(tensor.shape) for tensor in leaves]
            raise Error(
                f"inputs of the shapes {shapes} do not match {[tuple(shape) for shape, _ in self._shapes]}, with which "
                "the model was compiled: graphs are static"
            )
        factor = self._iterations * self._replicas * self._accumulation
        micro = [tensor.chunk(factor) for tensor in leaves]
        results = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self._restore_rng()
            for iteration in range(self._iterations):
                totals = {}
                for index in range(self._accumulation * self._replicas):
                    number = iteration * self._accumulation * self._replicas + index
                    results.append(self._run_one([chunks[number] for chunks in micro], index % self._replicas, totals))
                if self._training:
                    self.optimizer.step({name: total * self._scale for name, total in totals.items()})
            self._save_rng()
        returned = [
            of_output[0] if is_on_host else _narrowed(self._returned(of_output))
            for of_output, is_on_host in zip(zip(*results, strict=True), self._on_host, strict=True)
        ]
        return pytree.tree_unflatten(returned, self._output_spec)

    def _run_one(self, leaves, replica, totals):
        buffers = self._buffers[replica]
        everything = self._graph(
            [*(self._weights[n] for n in self._names), *(buffers[n] for n in self._buffer_names), *leaves]
        )
        for name, gradient in zip(self._trained, everything[self._num_outputs :], strict=False):
            if gradient is not None:
                totals[name] = totals.get(name, 0) + gradient.float()
        return [one.detach().clone() for one in everything[: self._num_outputs]]

    def _returned(self, results):
        """Return what the host gets of one output: scalars become vectors where there are several."""
        if self._mode is OutputMode.Sum:
            groups = [results[replica :: self._replicas] for replica in range(self._replicas)]
            kept = [torch.stack(group).sum(0) for group in groups]
        elif self._mode is OutputMode.Final:
            kept = list(results[-self._replicas :])
        elif self._mode is OutputMode.EveryN:
            rows = [results[i : i + self._replicas] for i in range(0, len(results), self._replicas)]
            kept = [one for row in rows[self._period - 1 :: self._period] for one in row]
        else:
            kept = list(results)
        if len(kept) == 1:
            return kept[0]
        return torch.cat([one.reshape(1) if one.dim() == 0 else one for one in kept])

    def _restore_rng(self):
        if len(self.rng_state) == 1:
            torch.manual_seed(self.rng_state[0])
        else:
            torch.set_rng_state(torch.tensor(self.rng_state, dtype=torch.uint8))

    def _save_rng(self):
        self.rng_state = torch.get_rng_state().tolist()


def _feeds(loss, other):
    """Return whether one loss is computed from another one."""
    seen, waiting = set(), [other.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(before for before, _ in node.next_functions)
    return loss.grad_fn in seen


def _narrowed(tensor):
    """Return a result as the device has it, which knows no numbers of 64 bits."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    return tensor.to(narrow.get(tensor.dtype, tensor.dtype))


def _leaves(args):
    leaves, spec = pytree.tree_flatten(args)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                "All forward function arguments used to compile and run the model must be Tensors or (possibly nested) "
                f"Lists and Tuples of Tensors (Got types: {type(leaf)})."
            )
    return leaves, spec
