"""The keys of DeepSpeed's configuration, against misspelling: DeepSpeed itself ignores most that it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dstrat_deepspeed.config_source import GivenConfig


def check_keys(given: GivenConfig) -> None:
    """Check the keys of a configuration."""
