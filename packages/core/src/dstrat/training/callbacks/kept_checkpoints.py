"""Retention and names of the checkpoints of a ModelCheckpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.checkpoint.paths import place
from dstrat.errors import CheckpointError
from dstrat.training.callbacks.checkpoint_name import UnusedPaths
from dstrat.training.callbacks.monitored import Mode, Ranking
from dstrat.training.checkpoint.path import written_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.checkpoint.paths import Place
    from dstrat.training.callbacks.checkpoint_name import CheckpointName

SaveLast = bool | Literal["link"]
LAST_NAME = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What rank 0 decided, for all ranks.

    Attributes:
        path: The checkpoint to write for the ranking, None where the score is not good enough.
        score: The monitored value, or the number of steps where nothing is monitored.
        last_path: The checkpoint that is the last one then, None where none is wanted.
        link: What is to lead to it, empty where nothing is.
        error: What is wrong with the request; every rank raises it.
    """

    path: str | None = None
    score: float = 0.0
    last_path: str | None = None
    link: str = ""
    error: str | None = None

    @property
    def paths(self) -> list[str]:
        """What is to be written."""
        return [path for path in dict.fromkeys((self.path, self.last_path)) if path is not None]


class RetainedCheckpoints:
    """The checkpoints of a run, by their paths.

    Args:
        limit: Number of them to keep by their score, -1 for all.
        mode: Whether the smallest or the largest score is the best.
        is_monitored: Whether scores are a monitored value, and not the number of steps.
        save_last: Whether the last one is kept besides; ``"link"`` takes the last that is kept by its score.

    Attributes:
        best_path: The best one, empty before the first.
        best_score: Its monitored value.
        last_path: The one that ``save_last`` keeps.
        link: A link to it, empty where there is none.
        unused: The paths of what is being saved, in the process that decides.
        resumed_from: The checkpoint from which the run has begun, which is not removed; empty without one.
    """

    def __init__(self, *, limit: int, mode: Mode, is_monitored: bool, save_last: SaveLast) -> None:
        self._ranking = Ranking(limit, mode)
        self._is_monitored = is_monitored
        self._saves_last = save_last is True or (save_last == "link" and limit == 0)
        self._links_last = save_last == "link" and limit != 0
        self.best_path = ""
        self.best_score: float | None = None
        self.last_path = self.link = self.resumed_from = ""
        self.unused = UnusedPaths()

    @property
    def scores(self) -> dict[str, float]:
        """What is kept by its score, with that."""
        return self._ranking.scores

    @property
    def next_to_go(self) -> str:
        """The one that a better one drives out, empty while there is room."""
        return self._ranking.replaceable or ""

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback's checkpoints say of them."""
        return {
            "scores": self._ranking.scores,
            "best_model_path": self.best_path,
            "best_model_score": self.best_score,
            "last_model_path": self.last_path,
            "link": self.link,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, in_same_folder: bool) -> None:
        """Take back what :meth:`state_dict` returned; those of another folder are remembered as best, and no more."""
        self.best_path, self.best_score = state["best_model_path"], state["best_model_score"]
        if in_same_folder:
            self._ranking.restore(state["scores"])
            self.last_path, self.link = state["last_model_path"], state.get("link", "")

    def decide(
        self, folder: Place, name: CheckpointName, values: Mapping[str, Any], score: float, *, replaces: bool
    ) -> Decision:
        """Return what to save now.

        Args:
            folder: Where it goes.
            name: Template of its name.
            values: What the template may ask for.
            score: Ranks it.
            replaces: Whether a checkpoint may be written over another one.

        Raises:
            MisuseError: The template cannot be filled.
        """
        path = None
        if self._ranking.accepts(score):
            replaceable = self._ranking.replaceable if replaces else None
            replaceable = None if replaceable == self.resumed_from else replaceable
            path = self._unused(folder, name.fill(values), replaceable)
        link = self.link or self._unused(folder, LAST_NAME) if self._links_last and replaces else ""
        return Decision(path=path, score=score, last_path=self._last(folder, path, replaces=replaces), link=link)

    def decide_last(self, folder: Place, *, replaces: bool) -> Decision:
        """Return what to save at the end of a training, whatever its score; nothing where none is kept besides."""
        return Decision(last_path=self._last(folder, None, replaces=replaces) if self._saves_last else None)

    def _last(self, folder: Place, path: str | None, *, replaces: bool) -> str | None:
        """Return what will be the last one: a file that is replaced, or a folder, which nothing replaces."""
        if self._links_last:
            return path
        if not self._saves_last:
            return None
        if replaces:
            return self.last_path or self._unused(folder, LAST_NAME)
        return path or self._unused(folder, LAST_NAME)

    def _unused(self, folder: Place, name: str, replaceable: str | None = None) -> str:
        return self.unused.choose(folder, name, replaceable, [*self._ranking.scores, self.last_path])

    def apply(self, decision: Decision, *, replaces: bool) -> list[str]:
        """Take a decision into the state, so that the checkpoint knows itself, and return the paths not kept any more.

        Args:
            decision: What is going to be saved.
            replaces: Whether the last one is replaced, rather than written anew beside the one before.
        """
        before, self.last_path = self.last_path, decision.last_path or self.last_path
        self.link = decision.link
        is_driven_out = self._saves_last and not replaces and before not in ("", self.last_path)
        driven_out = [before] if is_driven_out else []
        if decision.path is not None:
            if not self._is_monitored:
                self.best_path = decision.path
            elif self._ranking.is_better(decision.score, than=self.best_score):
                self.best_path, self.best_score = decision.path, decision.score
            removable = self._ranking.add(decision.path, decision.score)
            driven_out += [path for path in removable if path != self.resumed_from]
        scores = self._ranking.scores
        return [path for path in dict.fromkeys(driven_out) if path not in scores]

    def older_than_newest(self, paths: list[str]) -> list[str]:
        """Return those of some paths that are there, and are older than the newest one that is kept."""
        retained = [path for path in (*self._ranking.scores, self.last_path) if path and place(path).exists()]
        newest = max((written_ns(place(path)) for path in retained), default=0)
        existing = [path for path in paths if path not in retained and place(path).exists()]
        return [path for path in existing if written_ns(place(path)) < newest]

    def update_link(self) -> None:
        """Let the link lead to the last one, which is complete.

        Raises:
            CheckpointError: The file system has no links.
        """
        if not self.link or not self.last_path:
            return
        link = Path(self.link)
        temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed, and had this one's number
            temporary.symlink_to(Path(self.last_path).name)
            temporary.replace(link)
        except OSError as error:
            raise CheckpointError(f"{self.link!r} cannot be made a link ({error}): pass save_last=True") from error
