"""Iterable datasets of Hugging Face datasets, divided and resumed by themselves."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from dstrat import ShardedIterableDataset
from dstrat.errors import MisuseError
from dstrat_transformers.models import derives_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self


class SplitIterableDataset(ShardedIterableDataset):
    """An ``IterableDataset`` of Hugging Face, which divides itself between processes and workers.

    ``DataLoader(SplitIterableDataset(stream), batch_size=8)`` reads in each process its part of the stream only, by
    ``split_dataset_by_node``: whole files where their number can be divided by that of the processes, otherwise every
    n-th example.  In a StatefulDataLoader of torchdata a resumed run continues at the stream's own position; in torch's
    DataLoader it reads the examples of the epoch again and drops them.

    In evaluations each process reads the whole stream, and keeps its batches.  A map-style ``Dataset`` needs none of
    this: a DataLoader takes it as it is.

    Args:
        dataset: An ``IterableDataset``, such as of ``load_dataset(..., streaming=True)``.
    """

    def __init__(self, dataset: Any) -> None:
        if not derives_from(dataset, "datasets.iterable_dataset", "IterableDataset"):
            raise MisuseError(
                f"SplitIterableDataset takes an IterableDataset of Hugging Face datasets, and got a "
                f"{type(dataset).__name__}: a DataLoader takes a map-style Dataset as it is, and "
                "dstrat.ShardedIterableDataset any other iterable"
            )
        super().__init__(dataset)
        self._split: Any = None

    def divided(self, *, rank: int, num_replicas: int, batch_size: int | None, pads: bool) -> Self:
        divided = super().divided(rank=rank, num_replicas=num_replicas, batch_size=batch_size, pads=pads)
        if pads:  # in training; in an evaluation each process reads the whole stream, and keeps its batches
            from datasets.distributed import split_dataset_by_node

            divided._split = split_dataset_by_node(self.dataset, rank, num_replicas)  # noqa: SLF001 - of the same class
        return divided

    @property
    def _source(self) -> Any:
        return self.dataset if self._split is None else self._split

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by which a shuffled stream has another order."""
        super().set_epoch(epoch)
        if self._split is not None:
            self._split.set_epoch(epoch)

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known")

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._split is None else iter(self._split)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        # A copy, as the stream goes on with the same dict while a checkpoint is written in the background.
        state: dict[str, Any] = copy.deepcopy(self._source.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that :meth:`state_dict` returned."""
        self._source.load_state_dict(dict(state))
