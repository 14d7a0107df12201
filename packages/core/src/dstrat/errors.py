"""Every exception of dstrat.

Each derives from :class:`DstratError` and from the built-in that a caller would expect::

    DstratError
    ├── CatalogError                       finding and naming components
    │   ├── UnknownAliasError              KeyError       no distribution offers the alias
    │   ├── NotInstalledError              ImportError    a known package offers it, and is not installed (KeyError too)
    │   ├── RetiredAliasError              KeyError       it was renamed or retired
    │   ├── AmbiguousAliasError            LookupError    two distributions offer it
    │   ├── MissingRequirementError        ImportError    its distribution lacks something that it needs
    │   ├── BrokenComponentError           ImportError    its class cannot be imported, or is of another kind
    │   ├── PluginError                    RuntimeError   a plugin could not be loaded (strict mode)
    │   └── CatalogMismatchError           RuntimeError   ranks see different catalogs
    ├── InvalidComponentError              ValueError     a record that a plugin's author got wrong
    ├── RequestError                       ValueError     the request is not possible
    │   ├── ConflictError                                 two arguments of the request exclude each other
    │   ├── DeviceError                                   devices that do not exist, or a request that is not understood
    │   └── ClusterError                                  the environment contradicts the request or itself
    ├── MisuseError                        TypeError      user code lacks or returns something
    ├── LaunchError                        RuntimeError   processes could not be started
    │   └── RankFailedError                               a rank failed, and the job was ended
    ├── PeerError                          RuntimeError   the connection to other ranks was lost, or a wait timed out
    ├── AnomalyError                       FloatingPointError  values that are not finite, found by detect_anomaly
    ├── LoggerError                        RuntimeError   a logger failed in a run, or its folder cannot be made
    └── CheckpointError                    OSError        a checkpoint cannot be written or read
        └── StoreError                                    its store or disk refuses or fails
"""

from __future__ import annotations

from typing import Any


class DstratError(Exception):
    """Base of every exception that dstrat raises on purpose."""


class CatalogError(DstratError):
    """Base of the errors about finding and naming components."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class UnknownAliasError(CatalogError, KeyError):
    """No installed distribution offers the alias."""


class NotInstalledError(CatalogError, ImportError, KeyError):
    """A known distribution offers the alias, and it is not installed."""


class RetiredAliasError(CatalogError, KeyError):
    """The alias was renamed or retired."""


class AmbiguousAliasError(CatalogError, LookupError):
    """Several distributions offer the alias, and none is preferred."""


class MissingRequirementError(CatalogError, ImportError):
    """The component needs a distribution that is not installed, or another version of it."""


class BrokenComponentError(CatalogError, ImportError):
    """The component's class cannot be imported, or is not of the component's kind."""


class PluginError(CatalogError, RuntimeError):
    """A plugin could not be loaded, and strict mode is on."""


class CatalogMismatchError(CatalogError, RuntimeError):
    """The ranks of one job see different catalogs."""


class InvalidComponentError(DstratError, ValueError):
    """A component's record contradicts itself or the contract."""


class RequestError(DstratError, ValueError):
    """The request is not possible."""


class ConflictError(RequestError):
    """Two arguments of a request exclude each other, or one was passed twice."""


class DeviceError(RequestError):
    """The requested devices do not exist, or the request is not understood."""


class ClusterError(RequestError):
    """The environment of a cluster contradicts the request, or itself."""


class MisuseError(DstratError, TypeError):
    """User code lacks something that the operation needs, or returned an unusable value."""


class PeerError(DstratError, RuntimeError):
    """Communication failed because of other ranks; not the cause of a job's failure.

    A strategy whose library communicates by itself raises it, so that a job blames the rank that caused it.

    Attributes:
        timed_out: Whether a rank waited for the others for too long; otherwise it has lost the connection.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out

    def __reduce__(self) -> tuple[object, ...]:
        return _peer_error, (str(self), self.timed_out)


def _peer_error(message: str, timed_out: bool) -> PeerError:
    return PeerError(message, timed_out=timed_out)


class LaunchError(DstratError, RuntimeError):
    """The processes of a job could not be started."""


class RankFailedError(LaunchError):
    """A rank failed, and the job was ended.

    Attributes:
        rank: The global rank of the primary failure.
        exit_code: Its exit code, negative for a signal; None if it was ended because it hung.
        rank_traceback: Its traceback as text, empty if there is none.
        summary: The exception that it raised in one line, such as ``"ValueError: boom"``; empty if it raised none.
        attempts: A line for each attempt of a job with ``max_restarts``; empty without.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        exit_code: int | None = None,
        rank_traceback: str = "",
        summary: str = "",
        attempts: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.rank_traceback = rank_traceback
        self.summary = summary
        self.attempts = attempts

    def __reduce__(self) -> tuple[object, ...]:
        names = ("rank", "exit_code", "rank_traceback", "summary", "attempts")
        return _rank_failed, (str(self), {name: getattr(self, name) for name in names})


def _rank_failed(message: str, keywords: dict[str, Any]) -> RankFailedError:
    return RankFailedError(message, **keywords)


class AnomalyError(DstratError, FloatingPointError):
    """A module, the loss or the backward pass has values that are not finite."""


class LoggerError(DstratError, RuntimeError):
    """A logger failed in a run, of a Trainer or an own loop, or its folder cannot be made.

    The original error, such as an OSError of a full disk, is the ``__cause__``.  This class is no OSError, because
    loggers fail in many ways, for example by errors of a network or a service.  Outside of a run, the methods of a
    logger raise the errors of its library.
    """


class CheckpointError(DstratError, OSError):
    """A checkpoint cannot be written or read."""


class StoreError(CheckpointError):
    """The store or disk of checkpoints refuses or fails, so its content is unknown."""
