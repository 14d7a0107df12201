"""Base of sharded strategies in which several ranks share each batch."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dstrat.data.random_state import RankRandomState
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import tensors_in
from dstrat.parallel.collectives import broadcast_tensors, name_of_operation, uses_host_memory
from dstrat.parallel.replicas import is_compared
from dstrat.training.hooks import overrides
from dstrat.training.module.hooks import ModuleHooks
from dstrat_fsdp.sharded_strategy import ShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.strategy import StepName, TrainerLike


class Comparison(NamedTuple):
    """A comparison of a batch of this rank with those of others, under way.

    Attributes:
        works: The messages.
        digest: The checksum of this rank's batch.
        digests: Those of the others, by rank, which arrive in the first rank only.
        subject: The batch, for a message.
    """

    works: Sequence[Any]
    digest: Tensor
    digests: Mapping[int, Tensor]
    subject: str


class SharedBatchStrategy(ShardedStrategy):
    """A sharded strategy whose ranks form groups that read the same batch, such as those of tensor parallelism.

    Neighbouring ranks are the group of tensor parallelism; next come the groups that read different batches.

    Each of them loads the batch by itself.  Their random states are made equal at the start of each epoch, and the
    batches of some steps are compared.
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        self._forget_comparisons()  # also for a loop of one's own that sets up no module

    def setup(self, trainer: TrainerLike) -> None:
        self._forget_comparisons()
        super().setup(trainer)

    def _forget_comparisons(self) -> None:
        self._num_steps: Counter[str] = Counter()
        self._comparisons: list[Comparison] = []

    # Hooks of subclasses

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""

    @property
    @abstractmethod
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which layers are split."""

    @property
    @abstractmethod
    def _tensor_mesh(self) -> DeviceMesh:
        """The ranks over which layers are split."""

    @abstractmethod
    def _value_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the groups over which first values are broadcast one after the other, besides tensor parallelism."""

    @abstractmethod
    def _data_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the groups of ranks that read different batches, one for each dimension of the mesh."""

    @abstractmethod
    def _batch_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the groups of ranks that read the same batches, one for each axis."""

    @property
    def _num_data_groups(self) -> int:
        """Number of groups of ranks that compute with different data: other batches, or other parts of a batch."""
        return self.data_parallel_size

    # Data

    @property
    def _data_group(self) -> int:
        return self.global_rank // self.tensor_parallel_size % self._num_data_groups

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` of this rank's group, all ranks of which read the same data."""
        share = self._data_group * self.data_parallel_size // self._num_data_groups
        return {"num_replicas": self.data_parallel_size, "rank": share}

    @property
    def first_reader(self) -> int:
        """The first rank of this rank's group, all of which compute with the same data."""
        return self._data_group * self.tensor_parallel_size

    @property
    def _shares_batches(self) -> bool:
        """Whether several ranks read the same batches."""
        return self.data_parallel_size < self.world_size

    def share_random_state(self) -> None:
        if not self._shares_batches:
            return
        of_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(of_ranks, (self._reader, RankRandomState.capture(self)))
        first = next(state for reader, state in of_ranks if reader == self._reader)
        first.restore(self)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Return the context of an evaluation, before and after which ranks of a batch draw the same numbers."""
        self.share_random_state()
        self._raise_for_other_batches()
        with super().evaluation_context():
            yield
        self._raise_for_other_batches()
        self.share_random_state()  # layers may have drawn some

    def check_same_batch(self, name: StepName, batch: Any) -> None:
        """Compare the batch of a step on the ranks that share it, now and then; collective.

        Ranks that have loaded different samples once go on to.  The answer is read before the next step, so that no
        rank waits for another one here.

        Args:
            name: The step; those of each name are counted.
            batch: The batch, whose tensors are compared.

        Raises:
            MisuseError: The ranks had different batches before.
        """
        if not self._shares_batches:
            return
        self._raise_for_other_batches()
        self._num_steps[name] += 1
        number = self._num_steps[name]
        if not is_compared(number):
            return
        digest = torch.tensor([_digest(batch)])
        if not uses_host_memory():  # gloo sends from the memory of the host only
            digest = self.from_host(digest)
        for group in self._batch_groups():
            first, *senders = dist.get_process_group_ranks(group)
            # Messages, as a collective that another rank never comes to would keep this one at the end of the group.
            digests = {rank: torch.empty_like(digest) for rank in senders if self.global_rank == first}
            messages = [dist.P2POp(dist.irecv, buffer, rank, group) for rank, buffer in digests.items()]
            if self.global_rank != first:
                messages = [dist.P2POp(dist.isend, digest, first, group)]
            works = dist.batch_isend_irecv(messages)
            self._comparisons.append(Comparison(works, digest, digests, f"batch {number} of {name}"))

    def _raise_for_other_batches(self) -> None:
        """Read the answers to the latest comparison of batches, in the first rank of those that share one.

        Raises:
            MisuseError: The ranks had different batches.
        """
        comparisons, self._comparisons = self._comparisons, []
        for comparison in comparisons:
            for work in comparison.works:
                work.wait()
            for rank, digest in comparison.digests.items():
                if not torch.equal(digest, comparison.digest):
                    raise MisuseError(
                        f"rank {rank} has loaded another {comparison.subject} than rank {self.global_rank}, with which "
                        "it shares batches: a dataset, sampler or collate function depends on the rank, or draws "
                        "random numbers of python or numpy that only some ranks have drawn before, in a layer or a "
                        "hook. Let it draw from a generator of its own, with the same seed in all ranks, and divide "
                        "data by strategy.distributed_sampler_kwargs instead of the rank"
                    )

    def finish_training(self) -> None:
        self._raise_for_other_batches()
        super().finish_training()

    @property
    def _reader(self) -> int:
        return self.distributed_sampler_kwargs["rank"]

    # Layers that are split

    def _check_split(self, advice: str) -> None:
        """Raise MisuseError if ranks share a batch to split layers, and none is split."""
        split = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if self.tensor_parallel_size > 1 and not split:
            raise MisuseError(
                f"no layer of {type(self.module).__name__} is split over the {self.tensor_parallel_size} ranks of "
                f"{advice}"
            )

    def _take_first_shards(self, split: Sequence[DTensor]) -> None:
        shards = [tensor.to_local() for tensor in split if tensor.device_mesh == self._tensor_mesh]
        for group in self._value_groups():
            broadcast_tensors(shards, group)

    @property
    def _is_reusable(self) -> bool:
        return self.tensor_parallel_size == 1  # layers that are split hold the mesh of their run

    # Communication

    def reduce(
        self, tensor: Any, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp | None = "mean"
    ) -> Any:
        """Return the tensor reduced over all batches; ranks that share a batch count once."""
        name = name_of_operation(reduce_op)
        # Over all ranks, each batch counts once for each rank that shares it.  That changes no mean and no maximum, a
        # division corrects a sum, and nothing corrects a product.
        if group is None and name in ("product", "bxor"):
            for data_group in self._data_groups():
                tensor = super().reduce(tensor, group=data_group, reduce_op=reduce_op)
            return tensor
        reduced = super().reduce(tensor, group=group, reduce_op=reduce_op)
        if group is None and name in ("sum", "premul_sum") and reduced is not tensor:
            exact = None if reduced.is_floating_point() else "trunc"
            return torch.div(reduced, self.world_size // self._num_data_groups, rounding_mode=exact)
        return reduced

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all batches, stacked in the order of the data; ranks that share a batch count once.

        A rank gets those of the ranks at its position in each group that shares a batch.

        Args:
            tensor: A tensor of the same shape and dtype on every rank.
            group: The ranks to gather from, which all count; None for all batches.
            sync_grads: Whether gradients flow back: each rank gets the sum of those of its tensor.
        """
        if group is not None or not self._shares_batches:
            return super().all_gather(tensor, group, sync_grads)
        groups = self._data_groups()
        for data_group in reversed(groups):  # the innermost dimension first
            tensor = super().all_gather(tensor, data_group, sync_grads)
        readers_of_batch = self._num_data_groups // self.data_parallel_size
        values: Tensor = tensor.flatten(0, len(groups) - 1).unflatten(0, (self.data_parallel_size, readers_of_batch))
        self._check_same_values(values)
        return values[:, self._data_group % readers_of_batch]

    def gather_from_processes(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        return super().all_gather(tensor, group)

    def _check_same_values(self, values: Tensor) -> None:
        """Check that ranks with other parts of a batch have the same values for it.

        Args:
            values: Those of all ranks, of the shape ``(batches, parts, ...)``.
        """

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - the known name
        # The base class compares a sum of votes with the world size, and reduce counts ranks that share a batch once.
        vote = self.from_host(torch.tensor(float(decision)))
        return bool(super().reduce(vote, reduce_op="min" if all else "max"))


def check_splits_layers(
    training: TrainingSize, option: str, dimensions: Sequence[str], size: int, *, divides_experts: bool = False
) -> None:
    """Check that a module splits its layers, before anything runs.

    A module may define ``check_tensor_parallel(size, divides_experts)``, which raises an error if its layers cannot be
    split over so many ranks.

    Args:
        training: Sizes of the training.
        option: Name of the option that divides layers, for a message.
        dimensions: Names of the dimensions of the mesh, that of ``option`` last.
        size: Number of ranks that share a layer.
        divides_experts: Whether the strategy divides layers of experts otherwise.

    Raises:
        MisuseError: It has no ``configure_model``, or one that does not split layers over such a mesh.
    """
    module = training.module
    if not overrides(module, "configure_model", ModuleHooks):
        raise MisuseError(f"{type(module).__name__} has no configure_model, in which {option} needs parallelize_module")
    reached = training.mesh_dimension
    if reached is None or (reached and reached not in dimensions):
        problem = "does not use the mesh" if reached is None else f"asks for device_mesh[{reached!r}]"
        raise MisuseError(
            f"configure_model of {type(module).__name__} {problem}: {option} needs parallelize_module(..., "
            f"self.device_mesh[{dimensions[-1]!r}], ...) in it"
        )
    check = getattr(module, "check_tensor_parallel", None)
    if check is not None:
        check(size, divides_experts)


def _digest(batch: Any) -> int:
    """Return a checksum of the tensors of a batch."""
    checksum = 0
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided and not isinstance(tensor, DTensor):
            values = tensor.detach().cpu().flatten().contiguous()  # flatten keeps the stride of a column
            checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
    return checksum
