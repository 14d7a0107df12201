"""Work in a few threads, for as long as the process lives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from dstrat.builtin.checkpoint.portable.layout import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what the function returns for each item; the first error ends the work and is raised.

    Unlike an executor it works while the interpreter waits for its last threads, when the last checkpoint is written.
    """
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    numbered = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        while not failures:
            with lock:
                number, item = next(numbered, (-1, None))
            if number < 0:
                return
            try:
                results[number] = function(item)  # type: ignore[arg-type]  # None comes with -1 only
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(THREADS, len(items)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(items))]
