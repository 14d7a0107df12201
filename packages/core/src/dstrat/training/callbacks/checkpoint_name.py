"""Names of checkpoints: templates with logged values, and unused paths."""

from __future__ import annotations

from string import Formatter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.local_files import Claim
    from dstrat.checkpoint.portable.remote_files import UploadClaim

EXTENSION = ".ckpt"


class CheckpointName:
    """A template such as ``"{epoch}-{val_loss:.3f}"``, with logged names.

    Args:
        template: In the format of ``str.format``, with ``epoch``, ``step`` and logged names.
        shows_names: Whether to insert ``name=`` before each value.

    Attributes:
        template: The template.
        shows_names: Whether names are inserted.

    Raises:
        RequestError: The template is not valid.
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
        """Return the name with its values, which are read from their device.

        Raises:
            MisuseError: A name was not logged, or its format does not fit a number.
        """
        missing = [field for field in self._fields if field not in values]
        if missing:
            raise MisuseError(f"filename={self.template!r} asks for {missing[0]!r}, {not_logged(values)}")
        # ints stay, for formats such as {step:06d}; tensors become floats.
        numbers = {field: value if isinstance(value := values[field], int) else float(value) for field in self._fields}
        try:
            return _LiteralNames().vformat(self._filled, (), numbers)
        except ValueError as error:
            raise MisuseError(f"filename={self.template!r} cannot be filled: {error}") from error


def _with_name(text: str, field: str | None, spec: str | None, conversion: str | None) -> str:
    """Return a fragment of a template, with ``name=`` before its field."""
    text = text.replace("{", "{{").replace("}", "}}")  # Formatter.parse has removed the second ones
    if field is None:
        return text
    return f"{text}{field}={{{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"


class _LiteralNames(Formatter):
    """A formatter that takes names with dots and brackets literally, not as attributes and indices."""

    @override
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[field_name], field_name


def not_logged(values: Mapping[str, Any]) -> str:
    """Return the end of a message about a name that is not among the logged values."""
    if not values:
        return "which was not logged, nor was anything else: log it with self.log in a step of the module"
    return f"which was not logged: log it, or choose from {', '.join(sorted(values))}"


class UnusedPaths:
    """Unused paths of checkpoints, reserved against other jobs that save into the same folder."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim | UploadClaim] = {}

    def choose(
        self, folder: CheckpointPath, name: str, replaceable: str | None = None, used: Collection[str] = ()
    ) -> str:
        """Return an unused or replaceable path for a checkpoint, with a suffix ``-v1``, ``-v2`` ... if necessary.

        Args:
            folder: Folder of the checkpoint.
            name: Its name without extension.
            replaceable: A path that may be overwritten.
            used: Paths that may not exist yet, since they are still being written.
        """
        path, version = folder / f"{name}{EXTENSION}", 0
        while str(path) in used or not self._is_free(path):
            if str(path) == replaceable:
                break
            version += 1
            path = folder / f"{name}-v{version}{EXTENSION}"
        return str(path)

    def _is_free(self, path: CheckpointPath) -> bool:
        """Reserve a path if it is unused, and return whether it was."""
        storage = storage_of(path)
        if storage.is_occupied(path):
            return False
        claim = storage.claim(path)
        if not claim.take():
            return False
        self._claims[str(path)] = claim
        return True

    def release(self, paths: Iterable[str] | None = None) -> None:
        """Release some paths, or all, after their saves have succeeded or failed."""
        for path in list(self._claims) if paths is None else paths:
            if path in self._claims:
                self._claims.pop(path).release()
