"""Names in the JSON of a checkpoint: how a value that JSON lacks is marked, and what a place in it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container

MARK = "$"
"""The key of an object that stands for a value that JSON lacks; its value says of which kind."""

SEPARATOR = "/"

_MARKED_DICTS = ("dict", "ordered", "counter")


def joined(path: str, key: object) -> str:
    """Return the name of a place below another, such as ``state_dict/layers.0.weight``."""
    part = str(key).replace("~", "~0").replace(SEPARATOR, "~1")
    return f"{path}{SEPARATOR}{part}" if path else part


def split(path: str) -> list[str]:
    """Return the keys that lead to a place."""
    return [part.replace("~1", SEPARATOR).replace("~0", "~") for part in path.split(SEPARATOR)]


def insert(tree: Any, keys: list[str], value: Any) -> None:
    """Put a value into nested dicts, at a place that a name led to.

    Raises:
        ValueError: There is something else on the way.
    """
    for key in keys[:-1]:
        if isinstance(tree, dict):
            tree = tree.setdefault(key, {})
    if not isinstance(tree, dict) or keys[-1] in tree:
        raise ValueError(f"tensor {SEPARATOR.join(keys)[:200]!r} has no place among the values")
    tree[keys[-1]] = value


def without_tensors(value: Any, *, keep: Container[str]) -> Any:
    """Return the content of a JSON document without the tensors whose names are not to be kept."""
    if isinstance(value, list):
        return [without_tensors(item, keep=keep) for item in value if _stays(item, keep)]
    if not isinstance(value, dict):
        return value
    if value.get(MARK) in _MARKED_DICTS and isinstance(value.get("items"), list):
        pairs = [pair for pair in value["items"] if not isinstance(pair, list) or _stays(pair[-1], keep)]
        return {**value, "items": [without_tensors(pair, keep=keep) for pair in pairs]}
    return {key: without_tensors(item, keep=keep) for key, item in value.items() if _stays(item, keep)}


def _stays(item: Any, keep: Container[str]) -> bool:
    return not (isinstance(item, dict) and item.get(MARK) == "tensor" and item.get("name") not in keep)
