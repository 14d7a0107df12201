"""Names of plugins on stderr whose import takes long or is interrupted."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dstrat.plugins.settings import DISABLE

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def named_import(module: str, distribution: str, *, seconds: float) -> Iterator[None]:
    """Say on stderr which plugin is being imported, where that takes longer than some seconds or is interrupted."""
    begun = f"dstrat: importing {module} of {distribution}"
    cure = f"{DISABLE}={distribution} leaves it out"
    timer = threading.Timer(seconds, _say, [f"{begun} has taken {seconds:g} s and goes on; {cure}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        _say(f"{begun} was interrupted; {cure}")
        raise
    finally:
        timer.cancel()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
