"""Output of notebook cells: detection and HTML tables."""

from __future__ import annotations

import html
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def has_notebook() -> bool:
    """Return whether this process prints below the cells of a notebook, whose frontend shows HTML."""
    return _shell_of_kernel() is not None


def cell_number() -> int | None:
    """Return the number of the cell that runs; None outside of a notebook."""
    shell = _shell_of_kernel()
    return None if shell is None else shell.execution_count


class Output:
    """An output below the cell that runs, which can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: str, text: str) -> None:
        """Show HTML in place of what was shown before; frontends without HTML show the text."""
        from IPython.display import display  # there is one: the notebook's kernel has imported it

        # A message of a forked process goes through a pipe of ipykernel, but jupyter_client refuses to send it until
        # something is printed, which sets this number.
        _shell_of_kernel().display_pub.session.pid = os.getpid()
        data = {"text/html": content, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Iterable[str] = ()) -> str:
    """Return an HTML table.

    Args:
        head: Names of the columns.
        rows: Their cells as plain text, which is escaped.
        text_columns: Names of the columns that are aligned to the left; numbers are aligned to the right.
    """
    names_of_text = frozenset(text_columns)
    # Inline styles, as frontends remove style elements from outputs.
    styles = [f"text-align:{'left' if name in names_of_text else 'right'}" for name in head]

    def line(tag: str, cells: Sequence[str]) -> str:
        written = (
            f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell, style in zip(cells, styles, strict=True)
        )
        return f"<tr>{''.join(written)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def _shell_of_kernel() -> Any:
    """Return the shell of a notebook's kernel; None elsewhere, such as at the prompt of IPython in a terminal."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    return shell if hasattr(shell, "kernel") else None
