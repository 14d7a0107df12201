"""Adds the options of a command to its docstring while the site is built."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from collections.abc import Iterator

    from griffe import Function


class CommandOptions(Extension):  # type: ignore[misc]  # griffe is not in the environment of mypy
    """Reads the decorators of click; nothing is imported, as the environment of the site has no torch."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """List usage, arguments and options below the docstring of a command."""
        texts = [str(decorator.value) for decorator in func.decorators]
        if func.docstring is None or not any(text.startswith("click.command(") for text in texts):
            return
        calls = [ast.parse(text, mode="eval").body for text in texts]
        rows = [row for call in calls for row in _rows(call)]
        if rows:
            table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
            func.docstring.value = f"{func.docstring.value.rstrip()}\n\n{table}\n"


def _rows(call: ast.expr) -> Iterator[str]:
    """Return the row of an argument or option; nothing of another decorator."""
    if isinstance(call, ast.Name) and call.id == "json_option":
        yield "| `--json` | Print JSON. |"
    if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("click.argument", "click.option"):
        return
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if ast.unparse(call.func) == "click.argument":
        yield f"| `{texts[0].upper()}` | |"
        return
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    meaning = ast.literal_eval(values["help"])
    default = ast.unparse(values["default"]) if "default" in values else "None"
    shown = "" if default in ("None", "False") else f" Default: `{default.strip(chr(39))}`."
    names = ", ".join(f"`{text}`" for text in texts if text.startswith("-"))
    yield f"| {names} | {meaning}{shown} |".replace("\n", " ")
