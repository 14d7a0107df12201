"""Path arguments of commands: local paths and URLs of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from dstrat.builtin.checkpoint.place import place

if TYPE_CHECKING:
    from dstrat.builtin.checkpoint.place import Place


class PlaceType(click.ParamType):  # type: ignore[type-arg]  # older ones take no argument
    """A path of this machine, or a URL such as ``s3://bucket/folder``."""

    name = "path"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        return place(value)


PLACE = PlaceType()
