"""Training text: the source code of Python's standard library, which exists on every machine."""

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
"""One of this many files is used for validation."""
LARGER_IN_VALIDATION = 4
"""Training batches per validation batch: a validation stores no activations, so larger batches fit."""


class Windows(Dataset[Tensor]):
    """Consecutive windows of a text, each with the byte that follows it.

    Args:
        text: One byte per element.
        context: Bytes in a window; items have one more, because each byte is predicted from the bytes before it.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self._text, self._context = text, context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1]


class StandardLibrary(DataModule):
    """The library's files in the order of their names, split into training and validation by name.

    The same Python gives the same text on every machine and in every process.

    Args:
        context: Context length of the network in bytes.
        batch_size: Windows in a training batch, over all processes.
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
        """Return the validation windows in a fixed random order, so that a few batches cover all files."""
        spread = torch.randperm(len(self.validation), generator=torch.Generator().manual_seed(0))
        return DataLoader(self.validation, batch_size=LARGER_IN_VALIDATION * self._share(), sampler=spread.tolist())

    def _share(self) -> int:
        """Return the number of windows per batch of this process; tensor parallel ranks read the same ones."""
        return self.batch_size // self.trainer.strategy.distributed_sampler_kwargs.get("num_replicas", 1)


def source_files() -> list[tuple[str, Path]]:
    """Return the library's Python files without its tests, each with its name in the library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_THE_LIBRARY]  # os.walk does not enter the others
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found)
