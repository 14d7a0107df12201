"""HPU graphs: what a module computes, captured once and replayed in the same memory."""

import copy
import gc
import inspect

import torch
from torch import nn
from torch.utils import _pytree as pytree

from habana_frameworks.torch._device import simulator
from habana_frameworks.torch.utils.internal import is_lazy


class HPUGraph:
    """Operations that were captured, for replaying them."""

    def __init__(self):
        self._captured = simulator.HPUGraph()

    def capture_begin(self, dry_run=False):
        self._captured.capture_begin()

    def capture_end(self):
        self._captured.capture_end()

    def replay(self, asynchronous=False):
        self._captured.replay()

    def reset(self):
        self._captured = simulator.HPUGraph()


class graph:
    """A context in which operations are captured."""

    def __init__(self, hpu_graph, stream=None, dry_run=False):
        self.hpu_graph = hpu_graph

    def __enter__(self):
        gc.collect()
        self.hpu_graph.capture_begin()

    def __exit__(self, *error):
        self.hpu_graph.capture_end()


def make_graphed_callables(
    callables, sample_args, warmups=0, allow_unused_input=False, asynchronous=False, disable_tensor_cache=False,
    dry_run=False,
):  # fmt: skip
    """Return a module whose forward and backward passes are replayed; of a tuple of modules, all of them."""
    if isinstance(callables, tuple):
        return tuple(
            make_graphed_callables(one, arguments, warmups, allow_unused_input)
            for one, arguments in zip(callables, sample_args, strict=True)
        )
    module = callables
    hooks = (module._backward_hooks, module._forward_hooks, module._forward_pre_hooks)
    assert not any(hooks), "Modules must not have hooks registered at the time they are passed."
    assert not any(buffer.requires_grad for buffer in module.buffers()), "only parameters may be trainable"
    assert all(torch.is_tensor(argument) for argument in sample_args), "sample_args must be a tuple of Tensors"
    replayed = _Replayed(module, sample_args, allow_unused_input)
    eager, training = module.forward, module.training
    module.forward = lambda *inputs: replayed(*inputs) if module.training == training else eager(*inputs)
    return module


class _Replayed:
    """The forward and the backward pass of a module as graphs, with the memory that they read and write."""

    def __init__(self, module, sample_args, allow_unused_input):
        self.parameters = tuple(module.parameters())
        self.inputs, surface = sample_args, (*sample_args, *self.parameters)
        self.forward_graph, self.backward_graph = HPUGraph(), HPUGraph()
        with graph(self.forward_graph):
            outputs = module.forward(*sample_args)
        self.is_tensor = torch.is_tensor(outputs)
        self.outputs = (outputs,) if self.is_tensor else outputs
        self.output_gradients = tuple(
            torch.empty_like(output) if output.requires_grad else None for output in self.outputs
        )
        with graph(self.backward_graph):
            gradients = torch.autograd.grad(
                outputs=[output for output in self.outputs if output.requires_grad],
                inputs=[tensor for tensor in surface if tensor.requires_grad],
                grad_outputs=[gradient for gradient in self.output_gradients if gradient is not None],
                allow_unused=allow_unused_input,
                materialize_grads=allow_unused_input,
            )
        found = iter(gradients)
        self.input_gradients = tuple(next(found) if tensor.requires_grad else None for tensor in surface)
        self.function = _autograd_function(self)

    def __call__(self, *inputs):
        outputs = self.function.apply(*inputs, *self.parameters)
        return outputs[0] if self.is_tensor else outputs


def _autograd_function(replayed):
    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for fixed, given in zip(replayed.inputs, inputs, strict=False):  # the parameters are where they were
                fixed.copy_(given)
            replayed.forward_graph.replay()
            return tuple(output.detach() for output in replayed.outputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *gradients):
            for fixed, given in zip(replayed.output_gradients, gradients, strict=True):
                if fixed is not None:
                    fixed.copy_(given)
            replayed.backward_graph.replay()
            return tuple(None if gradient is None else gradient.detach() for gradient in replayed.input_gradients)

    return Graphed


class _TensorsOnly(nn.Module):
    """A module that takes and returns flat tuples of tensors."""

    def __init__(self, module, arguments, keywords):
        super().__init__()
        self.module = module
        leaves, self.arguments = pytree.tree_flatten((arguments, keywords))
        self.leaves = [None if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self.positions = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        self.outputs = None

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        arguments, keywords = pytree.tree_unflatten(leaves, self.arguments)
        flat, self.outputs = pytree.tree_flatten(self.module(*arguments, **keywords))
        return tuple(flat)


class ModuleCacher(nn.Module):
    """Replaces a module's forward by one that captures a graph for each shape of its inputs, and replays it."""

    def __init__(self, max_graphs=10):
        super().__init__()
        self.max_graphs = max_graphs
        self.graphs = {}
        self.forward_cnt = 0

    def __call__(
        self, model, use_lfu=False, inplace=True, allow_unused_input=False, asynchronous=False,
        have_grad_accumulation=False, log_frequency=100, verbose=False, disable_tensor_cache=False, dry_run=False,
    ):  # fmt: skip
        assert not isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel), (
            "Use DataParallel/DistributedDataParallel only after wrapping with ModuleCacher"
        )
        model = model if inplace else copy.copy(model)
        self.orig_model = copy.copy(model)
        for parameter in inspect.signature(self.orig_model.forward).parameters.values():
            assert parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL), (
                f"Unsupported argument type : {parameter.kind}"
            )
        # As attributes of nn.Module the two would be modules of each other.
        self.__dict__.update(model=model, allow_unused_input=allow_unused_input)
        self.have_grad_accumulation = have_grad_accumulation
        model.orig_forward = model.forward
        model.forward = self.forward
        model.set_iteration_count = self.set_iteration_count
        return model

    def set_iteration_count(self, iter_num):
        """Take the number of batches whose gradients have been accumulated already."""
        self.forward_cnt = iter_num

    def forward(self, *args, **kwargs):
        model = self.model
        if not (model.training and torch.is_grad_enabled() and is_lazy()):
            return model.orig_forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        described = [(leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        key = (str(structure), str(described), torch.is_autocast_enabled("hpu"))
        if self.have_grad_accumulation and self.forward_cnt == 0:
            key = (*key, "first")
        if key not in self.graphs:
            if len(self.graphs) >= self.max_graphs:
                return model.orig_forward(*args, **kwargs)
            wrapped = _TensorsOnly(self.orig_model, args, kwargs)
            tensors = tuple(leaf for leaf in leaves if torch.is_tensor(leaf))
            # The first inputs are the memory that later ones are copied to.
            fixed = tuple(
                tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor for tensor in tensors
            )
            make_graphed_callables(wrapped, fixed, allow_unused_input=self.allow_unused_input)
            self.graphs[key] = wrapped
        wrapped = self.graphs[key]
        flat = wrapped.forward(*(leaf for leaf in leaves if torch.is_tensor(leaf)))
        return pytree.tree_unflatten(list(flat), wrapped.outputs)
