"""Sources of a DeepSpeed configuration: dict, JSON file, environment."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrat.errors import RequestError

PATH_VARIABLE = "DSTRAT_DEEPSPEED_CONFIG_PATH"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig:
    """A configuration that the user has written.

    Attributes:
        place: Where it is, for error messages.
        values: What it says.
    """

    place: str
    values: dict[str, Any] = field(default_factory=dict)


def read_config(given: Mapping[str, Any] | str | Path | None, environ: Mapping[str, str]) -> GivenConfig:
    """Read the configuration of the user; empty where there is none.

    Args:
        given: The argument ``config``.
        environ: Names a file in ``DSTRAT_DEEPSPEED_CONFIG_PATH``, which is read where no argument is given.

    Raises:
        RequestError: There is no such file, or it is not a JSON object.
    """
    if isinstance(given, Mapping):
        return GivenConfig(place="config", values=copy.deepcopy(dict(given)))
    if given is not None and not isinstance(given, str | Path):
        raise RequestError(f"config is of the type {type(given).__name__}: give a dict, or the path of a JSON file")
    if given is None and not environ.get(PATH_VARIABLE):
        return GivenConfig(place="config")
    path = Path(given or environ[PATH_VARIABLE])
    place = f"config={str(path)!r}" if given is not None else f"{PATH_VARIABLE}={str(path)!r}"
    return GivenConfig(place=place, values=_parsed(path, place))


def _parsed(path: Path, place: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{place} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{place} holds a JSON {type(values).__name__}, and a configuration is an object: {{...}}")
    return values
