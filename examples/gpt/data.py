"""The text: the source code of Python's own standard library, which is on every machine."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dstrat import DataModule

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
VALIDATION_SHARE = 20
"""One file of so many is kept for validation."""
LARGER_IN_VALIDATION = 4
"""So many batches of the training are one of the validation, which keeps no activations and so takes less time."""


class Windows(Dataset[Tensor]):
    """Consecutive pieces of a text, each with the byte that follows it.

    Args:
        text: One byte per element.
        context: Bytes in a piece; items have one more, because each byte is predicted from those before it.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self._text, self._context = text, context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1]


class StandardLibrary(DataModule):
    """The library's files in the order of their names, divided into training and validation by name.

    The same Python gives the same text on every machine and in every process.

    Args:
        context: Bytes that the network looks back on.
        batch_size: Windows in a batch of the training, over all processes.
    """

    def __init__(self, *, context: int, batch_size: int) -> None:
        self.context, self.batch_size = context, batch_size

    def setup(self, stage: str) -> None:  # noqa: ARG002 - the same for all
        """Read the files."""
        training, validation = bytearray(), bytearray()
        for name, path in source_files():
            text = validation if zlib.crc32(name.encode()) % VALIDATION_SHARE == 0 else training
            text += path.read_bytes()
        self.training, self.validation = (
            Windows(torch.frombuffer(text, dtype=torch.uint8), self.context) for text in (training, validation)
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training windows in random order."""
        return DataLoader(self.training, batch_size=self._share(), shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows, spread over all files."""
        spread = torch.randperm(len(self.validation), generator=torch.Generator().manual_seed(0))
        return DataLoader(self.validation, batch_size=LARGER_IN_VALIDATION * self._share(), sampler=spread.tolist())

    def _share(self) -> int:
        """Return how many windows of a batch this process reads; those that share a layer read the same ones."""
        return self.batch_size // self.trainer.strategy.distributed_sampler_kwargs.get("num_replicas", 1)


def source_files() -> list[tuple[str, Path]]:
    """Return the library's Python files without its tests, each with its name in the library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_THE_LIBRARY]  # os.walk does not enter the others
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found)
