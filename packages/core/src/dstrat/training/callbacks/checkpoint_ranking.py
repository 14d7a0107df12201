"""Retention of a ModelCheckpoint's checkpoints: ranking, last one, removal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.checkpoint.paths import as_path
from dstrat.errors import CheckpointError
from dstrat.training.callbacks.checkpoint_name import UnusedPaths
from dstrat.training.callbacks.monitored import Mode, Ranking
from dstrat.training.checkpoint.path import written_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.training.callbacks.checkpoint_name import CheckpointName

SaveLast = bool | Literal["link"]
LAST_NAME = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Rank 0's decision about a save, for all ranks.

    Attributes:
        path: The checkpoint to write for the ranking; None if the score is not good enough.
        score: The monitored value, or the number of steps without a monitor.
        last_path: The last checkpoint after the save; None if none is retained.
        link: The path of a link to the last checkpoint; empty without one.
        error: The message of an error to raise on every rank; None without one.
    """

    path: str | None = None
    score: float = 0.0
    last_path: str | None = None
    link: str = ""
    error: str | None = None

    @property
    def paths(self) -> list[str]:
        """The checkpoints to write."""
        return [path for path in dict.fromkeys((self.path, self.last_path)) if path is not None]


class RetainedCheckpoints:
    """The retained checkpoints of a run.

    Args:
        limit: Number of checkpoints to retain by score; -1 is all.
        mode: Whether the smallest or the largest score is the best.
        is_monitored: Whether scores are a monitored value, not the number of steps.
        save_last: Whether the last checkpoint is retained too; ``"link"`` links to the last one retained by score.

    Attributes:
        best_path: The best checkpoint; empty before the first one.
        best_score: The monitored value of the best checkpoint.
        last_path: The last checkpoint, retained by ``save_last``.
        link: A link to the last checkpoint; empty without one.
        unused: The reserved paths of current saves, on rank 0.
        resumed_from: The checkpoint from which the run was resumed, which is never removed; empty without one.
    """

    def __init__(self, *, limit: int, mode: Mode, is_monitored: bool, save_last: SaveLast) -> None:
        self._ranking = Ranking(limit, mode)
        self._is_monitored = is_monitored
        # With limit 0 no checkpoint is retained by score, so there is none to link to.
        self._saves_last = save_last is True or (save_last == "link" and limit == 0)
        self._links_last = save_last == "link" and limit != 0
        self.best_path = ""
        self.best_score: float | None = None
        self.last_path = self.link = self.resumed_from = ""
        self.unused = UnusedPaths()

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the checkpoints retained by score, by path."""
        return self._ranking.scores

    @property
    def next_to_go(self) -> str:
        """The checkpoint that the next better one evicts; empty while the limit is not reached."""
        return self._ranking.replaceable or ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {
            "scores": self._ranking.scores,
            "best_model_path": self.best_path,
            "best_model_score": self.best_score,
            "last_model_path": self.last_path,
            "link": self.link,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, in_same_folder: bool) -> None:
        """Load the result of :meth:`state_dict`; of checkpoints in another folder only the best one."""
        self.best_path, self.best_score = state["best_model_path"], state["best_model_score"]
        if in_same_folder:
            self._ranking.restore(state["scores"])
            self.last_path = state["last_model_path"]
            self.link = state.get("link", "")  # older checkpoints have none

    def decide(
        self, folder: CheckpointPath, name: CheckpointName, values: Mapping[str, Any], score: float, *, replaces: bool
    ) -> Decision:
        """Return the decision about a save.

        Args:
            folder: Folder of the checkpoint.
            name: Template of its name.
            values: Values for the template.
            score: Score of the checkpoint.
            replaces: Whether a checkpoint may overwrite another one: files may, folders may not.

        Raises:
            MisuseError: The template needs a value that was not logged.
        """
        path = None
        if self._ranking.accepts(score):
            replaceable = self._ranking.replaceable if replaces else None
            replaceable = None if replaceable == self.resumed_from else replaceable  # which is never removed
            path = self._unused(folder, name.fill(values), replaceable)
        link = self.link or self._unused(folder, LAST_NAME) if self._links_last and replaces else ""
        return Decision(path=path, score=score, last_path=self._last(folder, path, replaces=replaces), link=link)

    def decide_last(self, folder: CheckpointPath, *, replaces: bool) -> Decision:
        """Return the decision about a save at the end of the training, independent of the score."""
        return Decision(last_path=self._last(folder, None, replaces=replaces) if self._saves_last else None)

    def _last(self, folder: CheckpointPath, path: str | None, *, replaces: bool) -> str | None:
        """Return the path of the last checkpoint: the same file every time, or a new folder."""
        if self._links_last:
            return path
        if not self._saves_last:
            return None
        if replaces:
            return self.last_path or self._unused(folder, LAST_NAME)
        return path or self._unused(folder, LAST_NAME)

    def _unused(self, folder: CheckpointPath, name: str, replaceable: str | None = None) -> str:
        # Retained checkpoints are in use even before they exist: a write in the background may not have begun.
        return self.unused.choose(folder, name, replaceable, [*self._ranking.scores, self.last_path])

    def apply(self, decision: Decision, *, replaces: bool) -> list[str]:
        """Apply a decision, and return the evicted paths.

        It is applied before the save, since the checkpoint contains this state.

        Args:
            decision: The decision about the save.
            replaces: Whether the last checkpoint is overwritten; otherwise it is a new folder.
        """
        before, self.last_path = self.last_path, decision.last_path or self.last_path
        self.link = decision.link
        is_evicted = self._saves_last and not replaces and before not in ("", self.last_path)
        evicted = [before] if is_evicted else []
        if decision.path is not None:
            if not self._is_monitored:
                self.best_path = decision.path
            elif self._ranking.is_better(decision.score, than=self.best_score):
                self.best_path, self.best_score = decision.path, decision.score
            removable = self._ranking.add(decision.path, decision.score)
            evicted += [path for path in removable if path != self.resumed_from]
        scores = self._ranking.scores
        return [path for path in dict.fromkeys(evicted) if path not in scores]  # the last one may be among the best

    def older_than_newest(self, paths: list[str]) -> list[str]:
        """Return the existing ones of some paths that are older than the newest retained checkpoint."""
        retained = {*self._ranking.scores, self.last_path} - {""}
        existing = {name: path for name in (*retained, *paths) if (path := as_path(name)).exists()}
        times = {name: written_ns(path) for name, path in existing.items()}
        newest = max((times[name] for name in retained & times.keys()), default=0)
        return [name for name in paths if name not in retained and times.get(name, newest) < newest]

    def update_link(self) -> None:
        """Point the link to the last checkpoint, which is complete.

        Raises:
            CheckpointError: The file system does not support links.
        """
        if not self.link or not self.last_path:
            return
        link = Path(self.link)
        temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process with the same pid
            temporary.symlink_to(Path(self.last_path).name)
            temporary.replace(link)
        except OSError as error:
            raise CheckpointError(f"cannot create the link {self.link!r} ({error}): pass save_last=True") from error
