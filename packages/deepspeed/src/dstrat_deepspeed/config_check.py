"""Letting DeepSpeed read a configuration before it is used, and telling what it does not take, or does not look at."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_ELSEWHERE = {"data_parallel_size", "sequence_parallel_size", "keep_in_fp32_modules"}
_LENIENT = (
    "activation_checkpointing",
    "aio",
    "data_efficiency",
    "flops_profiler",
    "torch_autocast",
)
"""Sections whose keys DeepSpeed asks for one by one, whatever else they have; others refuse what they do not know."""


def check_config(config: dict[str, Any], place: str) -> None:
    """Check the values and the keys of a configuration.

    Args:
        config: The whole of it.
        place: Where the user has written a part of it, for error messages.

    Raises:
        RequestError: DeepSpeed does not take it, or it has a key that DeepSpeed does not look at.
    """
    sections = {name: _ObservedKeys(config[name]) for name in _LENIENT if isinstance(config.get(name), dict)}
    observed = _ObservedKeys({**config, **sections})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(observed)
    except Exception as error:  # a dozen classes, by the part of DeepSpeed that reads a section
        raise RequestError(f"DeepSpeed does not take the configuration ({place}): {_reason(error)}") from error
    _check_keys(config, observed.asked | _READ_ELSEWHERE, place)
    for name in _LENIENT:
        section = observed.get(name)
        if isinstance(section, _ObservedKeys):
            _check_keys(config[name], section.asked, f"{place}, in its section {name},")


def _check_keys(values: dict[str, Any], known: set[str], place: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ": leave it out"
        raise RequestError(f"{place} has the key {unknown[0]!r}, which DeepSpeed does not know{hint}")


def _reason(error: Exception) -> str:
    details = getattr(error, "errors", None)
    if details is None:  # not pydantic's
        return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in its own check"
    section = getattr(error, "title", "").removeprefix("DeepSpeed").removesuffix("Config")
    return "; ".join(
        f"{section} {'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}" for detail in details()
    )


class _ObservedKeys(dict[str, Any]):
    """A dict that notes which keys it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Return what notes the questions of ``key in config.keys()`` too."""
        return self

    def __copy__(self) -> _ObservedKeys:
        return self  # DeepSpeed reads a copy

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()
