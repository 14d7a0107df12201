"""Interface of algorithms, and their choice by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.plugins.settings import nearest
from dstrat_bagua.communication import CommunicationThread, Ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.communication import Collective
    from dstrat.interfaces.memory import TrainingSize
    from dstrat_bagua.buckets import Bucket, Work


@dataclass(kw_only=True)
class Replica:
    """The replica of the module in this process, as an algorithm sees it.

    Attributes:
        parameters: The trainable parameters by name, in the order of the module.
        optimizers: The optimizers.
        device: Device of the parameters.
        rank: Rank of this process.
        world_size: Number of processes.
        node_rank: Rank of this machine.
        timeout: How long a rank waits for the others.
        steps: Number of optimizer steps so far, those of resumed runs included.
    """

    parameters: Mapping[str, Parameter]
    optimizers: Sequence[Optimizer]
    device: torch.device
    rank: int
    world_size: int
    node_rank: int
    timeout: timedelta
    steps: int = 0
    _ranks: Ranks | None = field(default=None, repr=False)
    _thread: CommunicationThread | None = field(default=None, repr=False)

    def open_ranks(self, *, hierarchical: bool) -> Ranks:
        """Open process groups for an algorithm; collective."""
        self._ranks = Ranks(self.node_rank, hierarchical=hierarchical, timeout=self.timeout)
        return self._ranks

    def start_thread(self) -> CommunicationThread:
        """Start a thread for exchanges beside the training."""
        self._thread = CommunicationThread(self.device, self.timeout)
        return self._thread

    def close(self) -> None:
        """End the thread, and drop the groups before the job's process group is closed."""
        if self._thread is not None:
            self._thread.close()
        if self._ranks is not None:
            self._ranks.release()
        self._thread = self._ranks = None


class Algorithm:
    """One way in which replicas exchange gradients or weights.

    A subclass overrides what it needs.  The smallest one::

        class Summed(Algorithm):
            def reduce_gradients(self, bucket):
                return dist.all_reduce(bucket.flat, async_op=True)

        Trainer(strategy=BaguaStrategy(algorithm=Summed()))

    It is constructed before processes start, must pickle, and may run several trainings.

    Attributes:
        replicas_differ: Whether the replicas have different weights between their exchanges.  Then evaluation and
            checkpoints get the average of their weights.
        weight_copies: Number of copies of the trainable weights that a rank holds, for ``dstrat estimate``.
        replica: The replica, from :meth:`setup` on.
    """

    replicas_differ: bool = False
    weight_copies: int = 0
    replica: Replica

    def setup(self, replica: Replica) -> None:
        """Prepare for a training, when optimizers exist and nothing has been loaded yet; collective.

        Raises:
            RequestError: The algorithm cannot run on these ranks.
            MisuseError: It cannot train with these optimizers or parameters.
        """
        self.replica = replica

    @property
    def exchanges_gradients(self) -> bool:
        """Whether :meth:`reduce_gradients` is called in the next backward pass; the same on all ranks."""
        return not self.replicas_differ

    def sent_gradients(self, training: TrainingSize) -> tuple[Collective, ...] | None:  # noqa: ARG002 - most algorithms override it
        """Return the collectives of gradients in an optimizer step, for ``dstrat choose``; None if not known."""
        return None

    def reduce_gradients(self, bucket: Bucket) -> Work:
        """Start to replace ``bucket.flat``, which has the gradients of this rank, by the exchanged ones; collective.

        It is called in the backward pass, in the same order on all ranks.

        Returns:
            An object whose ``wait()`` returns when the bucket has the exchanged values.
        """
        raise NotImplementedError(f"{type(self).__name__} exchanges gradients, and defines no reduce_gradients")

    def before_forward(self) -> None:
        """Act before the forward pass of the last batch of an optimizer step."""

    def before_step(self) -> None:
        """Act after the gradients are computed, and before the optimizer applies them."""

    def after_step(self) -> None:
        """Act after an optimizer step; ``replica.steps`` includes it."""

    def finish(self) -> None:
        """Stop exchanging before the final weights of all ranks are averaged; collective."""

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank, with tensors and plain values, that an exact resumption needs."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`rank_state` returned, after weights and optimizers."""

    def close(self) -> None:
        """Free everything, also after an error; it waits for no other rank."""


# Choice by name


_BUILT_IN = {
    "async": "async_model_average:AsyncModelAverageAlgorithm",
    "bytegrad": "bytegrad:ByteGradAlgorithm",
    "decentralized": "decentralized:DecentralizedAlgorithm",
    "gradient_allreduce": "gradient_allreduce:GradientAllReduceAlgorithm",
    "low_precision_decentralized": "low_precision_decentralized:LowPrecisionDecentralizedAlgorithm",
    "qadam": "q_adam:QAdamAlgorithm",
}


def choose_algorithm(algorithm: str | Algorithm, options: Mapping[str, Any], known: Collection[str]) -> Algorithm:
    """Return the requested algorithm.

    Args:
        algorithm: A name, or an instance.
        options: Constructor arguments for a name.
        known: Arguments of the strategy, which are suggested too.

    Raises:
        RequestError: No algorithm has this name.
        ConflictError: An instance has options.
        MisuseError: The algorithm has no such option, or ``algorithm`` is a value of another type.
    """
    if isinstance(algorithm, Algorithm):
        if options:
            raise ConflictError(
                f"BaguaStrategy got {', '.join(map(repr, options))} beside an instance of {type(algorithm).__name__}: "
                "pass options to the constructor of the algorithm"
            )
        return algorithm
    if not isinstance(algorithm, str):
        raise MisuseError(
            f"algorithm {algorithm!r} must be an instance of dstrat_bagua.Algorithm, or one of {', '.join(_BUILT_IN)}"
        )
    if algorithm not in _BUILT_IN:
        near = nearest(algorithm, _BUILT_IN)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise RequestError(f"algorithm {algorithm!r} is not one of {', '.join(_BUILT_IN)}{meant}")
    module, _, name = _BUILT_IN[algorithm].partition(":")
    cls: type[Algorithm] = getattr(import_module(f"dstrat_bagua.{module}"), name)
    possible = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in possible:
            near = nearest(option, [*possible, *known])
            advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(possible)}"
            raise MisuseError(
                f"BaguaStrategy got {option!r}, which neither it nor the algorithm {algorithm!r} has; {advice}"
            )
    return cls(**options)


def check_flag(name: str, value: object) -> bool:
    """Return an option that is True or False.

    Raises:
        MisuseError: It is something else.
    """
    if not isinstance(value, bool):
        raise MisuseError(f"{name} {value!r} must be True or False")
    return value


def check_count(name: str, value: object, *, least: int, unit: str) -> int:
    """Return an option that is a whole number.

    Raises:
        RequestError: It is something else, or less than ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} {value!r} must be a whole number of {unit}, at least {least}")
    return value


def check_choice(name: str, value: object, possible: Sequence[str]) -> str:
    """Return an option that is one of some names.

    Raises:
        RequestError: It is something else.
    """
    if not isinstance(value, str) or value not in possible:
        near = nearest(value, possible) if isinstance(value, str) else ()
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise RequestError(f"{name} {value!r} is not {' or '.join(map(repr, possible))}{meant}")
    return value


def check_real(replica: Replica, algorithm: str) -> None:
    """Raise MisuseError if a parameter has numbers that cannot be compressed to levels between two bounds.

    Raises:
        MisuseError: A parameter is complex.
    """
    for name, parameter in replica.parameters.items():
        if not parameter.is_floating_point():
            raise MisuseError(
                f"algorithm {algorithm!r} compresses real numbers, and {name!r} has the dtype {parameter.dtype}: "
                'choose algorithm="gradient_allreduce", or freeze it'
            )
