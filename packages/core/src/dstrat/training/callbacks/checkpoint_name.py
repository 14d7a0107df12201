"""Names of checkpoints: templates with logged values, and paths that overwrite nothing."""

from __future__ import annotations

from string import Formatter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dstrat.checkpoint.paths import Place
    from dstrat.checkpoint.portable.local_files import Claim

EXTENSION = ".ckpt"


class CheckpointName:
    """A template such as ``"{epoch}-{val_loss:.3f}"``, with names as they were logged.

    Args:
        template: ``epoch`` and ``step`` are known always; formats are those of ``str.format``.
        shows_names: Whether ``name=`` is put before each value.

    Attributes:
        template: As it was given.
        shows_names: As it was given.

    Raises:
        RequestError: It is not a template.
    """

    def __init__(self, template: str, *, shows_names: bool = False) -> None:
        try:
            fragments = list(Formatter().parse(template))
        except ValueError as error:
            raise RequestError(f"filename={template!r} is not a template: {error}") from error
        fields = [field for _, field, _, _ in fragments if field is not None]
        if "" in fields:
            raise RequestError(f"filename={template!r} has a field without a name: write one, such as {{epoch}}")
        self.template, self.shows_names = template, shows_names
        self._filled = "".join(_with_name(*fragment) for fragment in fragments) if shows_names else template
        self._fields = fields

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the name with its values, which are read from their device now.

        Raises:
            MisuseError: It asks for something that was not logged, or in a format that a number does not have.
        """
        missing = [field for field in self._fields if field not in values]
        if missing:
            raise MisuseError(f"filename={self.template!r} asks for {missing[0]!r}, {not_logged(values)}")
        numbers = {field: _number(values[field]) for field in self._fields}
        try:
            return _LiteralNames().vformat(self._filled, (), numbers)
        except ValueError as error:
            raise MisuseError(f"filename={self.template!r} cannot be filled: {error}") from error


def _with_name(text: str, field: str | None, spec: str | None, conversion: str | None) -> str:
    """Return a part of a template, with ``name=`` before its field."""
    text = text.replace("{", "{{").replace("}", "}}")
    if field is None:
        return text
    return f"{text}{field}={{{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"


class _LiteralNames(Formatter):
    """Takes a field's name as it stands, also with dots and brackets."""

    @override
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[field_name], field_name


def not_logged(values: Mapping[str, Any]) -> str:
    """Return the end of a sentence about a name that is not among the values."""
    if not values:
        return "which was not logged, nor was anything else: log it with self.log in a step of the module"
    return f"which was not logged: log it, or choose from {', '.join(sorted(values))}"


class UnusedPaths:
    """Paths of checkpoints that nothing is at, kept from other jobs that save into the same folder.

    In a store that fsspec reaches they are not kept: of two jobs that choose the same one, the slower gets an error.
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def choose(self, folder: Place, name: str, replaceable: str | None = None, used: Collection[str] = ()) -> str:
        """Return the path of a checkpoint that does not exist, or that may be replaced; others get ``-v1``, ``-v2`` ...

        Args:
            folder: Where it will be.
            name: Its name without extension.
            replaceable: A path that may be written over.
            used: Paths that may not be there yet, because they are still being written.
        """
        path, version = folder / f"{name}{EXTENSION}", 0
        while str(path) in used or not self._is_free(path):
            if str(path) == replaceable:
                break
            version += 1
            path = folder / f"{name}-v{version}{EXTENSION}"
        return str(path)

    def _is_free(self, path: Place) -> bool:
        """Return whether nothing is at a path, and keep it then."""
        storage = storage_of(path)
        if storage.is_taken(path):
            return False
        claim = storage.claim(path)
        if claim is None:
            return True
        if not claim.take():
            return False
        if storage.is_taken(path):  # its writer has come to its end in between
            claim.release()
            return False
        self._claims[str(path)] = claim
        return True

    def release(self, paths: Iterable[str] | None = None) -> None:
        """Let others choose some paths, or all, when the checkpoints are there or are not going to be."""
        for path in list(self._claims) if paths is None else paths:
            if path in self._claims:
                self._claims.pop(path).release()


def _number(value: Any) -> int | float:
    return value if isinstance(value, int) else float(value)
