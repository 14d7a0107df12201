"""Text of Python's standard library as tokens: a tokenizer trained on it, and windows of equal length."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from torch import Tensor

END = "<|end|>"
"""Separator token between two files."""


def texts(kilobytes: int) -> list[str]:
    """Return source files of the standard library, in alphabetical order, up to a total size."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if sum(map(len, found)) > 1024 * kilobytes:
            break
        found.append(path.read_text(encoding="utf-8", errors="ignore"))
    return found


def train_tokenizer(documents: list[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer; the same texts give the same tokenizer in each process."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(documents, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=END, pad_token=END)  # noqa: SLF001 - transformers needs the inner tokenizer


class Windows(Dataset[dict[str, "Tensor"]]):
    """Concatenated texts, cut into windows of equal length.

    Args:
        documents: The texts.
        tokenizer: Tokenizer for the texts.
        length: Tokens per window.
    """

    def __init__(self, documents: list[str], tokenizer: Any, length: int) -> None:
        tokens = tokenizer(END.join(documents), return_attention_mask=False)["input_ids"]
        count = len(tokens) // length
        self._windows = torch.tensor(tokens[: count * length]).view(count, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}
