"""Showing what a rank failed of without the stack of the process that only watched over the ranks."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from dstrat.errors import RankFailedError


def show_without_stack(error: RankFailedError) -> None:
    """Let an error that nobody catches be shown by its message alone, which has the rank's own traceback.

    Where the ranks run the script again, the process that started them stands in its first call, and they may have
    failed in a later one.  An error that is caught leaves nothing behind when it is gone.
    """
    show_others = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is failed():
            sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {value}\n")
        else:
            show_others(kind, value, traceback)

    def restore(_: object) -> None:
        if sys.excepthook is show:
            sys.excepthook = show_others

    failed = weakref.ref(error, restore)
    sys.excepthook = show
