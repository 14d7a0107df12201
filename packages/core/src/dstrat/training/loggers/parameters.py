"""Settings and values of a run in the shapes that loggers write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.training.module.plain_values import fields_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return the settings, which may be a mapping, a namespace or a dataclass, by name."""
    fields = fields_of(params)
    return vars(params) if fields is None else fields


def flatten(params: Any) -> dict[str, Any]:
    """Return the settings without nesting, as ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in as_mapping(params).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": deeper for inner, deeper in flatten(value).items()}
        else:
            flat[str(name)] = value
    return flat


def as_numbers(metrics: Mapping[str, Any], prefix: str = "", separator: str = "-") -> dict[str, Any]:
    """Return values with a prefix before their names; tensors, which users log, as numbers."""
    start = f"{prefix}{separator}" if prefix else ""
    return {f"{start}{name}": value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


def named_images(key: str, images: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield images with a name for each: the key for one, and ``key/0``, ``key/1`` ... for several.

    Raises:
        RequestError: There is no list of them.
    """
    if not isinstance(images, list | tuple):
        raise RequestError(f"log_image({key!r}) takes a list of images, and got {type(images).__name__}")
    for index, image in enumerate(images):
        yield (key if len(images) == 1 else f"{key}/{index}"), image


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of height, width and channels, or of height and width.

    Args:
        image: A tensor of channels, height and width, or of height and width; an array; an image of PIL; a file's path.
    """
    import numpy as np
    from torch import Tensor

    if isinstance(image, Tensor):
        array: np.ndarray[Any, Any] = image.detach().cpu().numpy()
        return array.transpose(1, 2, 0) if array.ndim == 3 else array
    if isinstance(image, str | Path):
        from PIL import Image

        with Image.open(image) as opened:
            return np.asarray(opened)
    return np.asarray(image)
