"""Backward passes in two parts: gradients of a stage's input, and later those of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


@dataclass(slots=True)
class _Operation:
    """An operation between a stage's input and output, whose gradients of weights are computed later.

    Attributes:
        node: Its node in the graph.
        weights: The weights.
        gradients: Those of its outputs; None until the gradient of the stage's input has been computed.
    """

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] | None = None


@dataclass(slots=True)
class WeightGradients:
    """Gradients of weights that a backward pass has left to compute.

    It keeps the activations of the stage.
    """

    _operations: list[_Operation] = field(default_factory=list)

    def compute(self) -> None:
        """Accumulate the gradients of the weights, and free the activations."""
        operations, self._operations = self._operations, []
        for operation in operations:
            captured: Any = operation.gradients
            present = [(number, value) for number, value in enumerate(captured or ()) if value is not None]
            if not present:
                continue
            # Hooks of the operation's output have changed these gradients already, and would change them again.
            handle = operation.node.register_prehook(lambda _, captured=captured: captured)
            try:
                torch.autograd.backward(
                    [GradientEdge(operation.node, number) for number, _ in present],
                    [value for _, value in present],
                    inputs=operation.weights,
                )
            finally:
                handle.remove()


def backward_to_input(output: Tensor, gradient: Tensor | None, received: Tensor) -> WeightGradients:
    """Accumulate the gradient of a stage's input, and return those of weights, which are to be computed.

    Qi et al. 2023, https://arxiv.org/abs/2401.10241.  Nothing is computed twice: the gradients of an operation's
    outputs are kept, and those of its weights follow from them.  Weights are no part of that if several operations have
    them, or one that computes its gradients together, as those of Python do (``torch.autograd.Function``): their
    gradients are accumulated at once.

    torch has the same (``torch.distributed.pipelining._backward``), but its order of operations differs between ranks,
    so that collectives in them wait forever; and it computes a part of the graph again for weights of several
    operations, and in torch 2.9 counts their gradients twice.

    Args:
        output: The stage's output, or its loss.
        gradient: The gradient of the output; None for a loss.
        received: The stage's input, a leaf that requires gradients.
    """
    operations, at_once, reaches_input = _divide(output, received)
    if not reaches_input:
        output.backward(gradient)
        return WeightGradients()
    handles = [operation.node.register_prehook(_capture(operation)) for operation in operations]
    try:
        output.backward(gradient, retain_graph=bool(operations), inputs=[received, *at_once])
    finally:
        for handle in handles:
            handle.remove()
    return WeightGradients(operations)


def _capture(operation: _Operation) -> Any:
    def capture(gradients: tuple[Tensor | None, ...]) -> None:
        operation.gradients = gradients

    return capture


def _divide(output: Tensor, received: Tensor) -> tuple[list[_Operation], list[Tensor], bool]:
    """Return operations whose weights can wait, the other weights, and whether the output depends on the input.

    The order is that of the graph, and the same on all ranks that compute alike.
    """
    target, root = get_gradient_edge(received).node, get_gradient_edge(output).node
    order = _children_first(root)
    on_path = {target}
    variables: dict[Node, Tensor] = {}  # of the nodes that accumulate the gradients of leaves
    weights: dict[Node, dict[Node, None]] = {}  # of nodes beside the path; dicts keep the order
    users: dict[Node, int] = {}  # number of the path's operations that have a weight
    beside: list[tuple[Node, dict[Node, None]]] = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node is target:
            continue
        if any(child in on_path for child in children):
            on_path.add(node)
            leaves = {leaf: None for child in children if child not in on_path for leaf in weights[child]}
            if leaves:
                beside.append((node, leaves))
            for leaf in leaves:
                users[leaf] = users.get(leaf, 0) + 1
        elif (variable := getattr(node, "variable", None)) is not None:
            variables[node], weights[node] = variable, {node: None}
        else:
            weights[node] = {leaf: None for child in children for leaf in weights[child]}
    operations, at_once = [], {}
    for node, leaves in beside:
        waits = {leaf for leaf in leaves if users[leaf] == 1 and not _is_python(node)}
        if waits:
            operations.append(_Operation(node, [variables[leaf] for leaf in leaves if leaf in waits]))
        at_once.update({leaf: variables[leaf] for leaf in leaves if leaf not in waits})
    return operations, list(at_once.values()), root in on_path


def _children_first(root: Node) -> list[Node]:
    """Return the nodes of a graph, each after those that it passes gradients to."""
    order: list[Node] = []
    seen, stack = {root}, [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _is_python(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)
