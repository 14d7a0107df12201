"""Machines as data: memory, peak rates and links, of a file or of a vendor's datasheet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from dstrat.errors import RequestError
from dstrat.interfaces.communication import CollectiveKind
from dstrat.plugins.settings import nearest

PAGE = 4096
"""Bytes of a page of memory."""

_KINDS = (*get_args(CollectiveKind), "any")
_SCOPES = ("machine", "network")
_KNOWN = Path(__file__).with_name("machines.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Speed of a kind of collective between ranks.

    Attributes:
        kind: The kind, or ``"any"`` for all kinds without an entry.
        scope: ``"machine"`` for ranks of one machine, ``"network"`` for ranks of several.
        ranks: Number of ranks that it was measured with; 2 in datasheets, which describe a link between two devices.
        latency: Seconds of a collective of a few bytes.
        bandwidth: Bytes per second that each rank sends: nccl-tests' bus bandwidth.
    """

    kind: CollectiveKind | Literal["any"]
    scope: Literal["machine", "network"]
    ranks: int
    latency: float
    bandwidth: float

    def seconds(self, sent: float, ranks: int) -> float:
        """Return the time of a collective.

        Args:
            sent: Bytes that each rank sends.
            ranks: Number of ranks; its messages are those of a ring, whose latencies add up.
        """
        return self.latency * (ranks - 1) / max(1, self.ranks - 1) + sent / self.bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Speed of one of several equal machines.  Rates are those of one device while all of them work.

    Attributes:
        name: Its name, for messages.
        device: Model of its devices.
        device_type: Type of its devices, such as ``"cuda"``.
        devices: Number of its devices.
        memory: Memory of a device in bytes.
        flops: Floating-point operations per second in matrix products, by dtype, such as ``"bfloat16"``.
        memory_bandwidth: Bytes per second that operations such as copies read and write in the device's memory.
        operation_latency: Seconds that a device is busy with an operation on a few elements.
        hook_latency: Seconds in which Python runs the hooks of a layer, before and after both passes; 0 where a device
            computes meanwhile.  None, if it is not known, counts as 0.
        page_latency: Seconds in which the system provides a page of memory, of 4 KiB, when it is first written; 0 where
            an allocator keeps the memory, as on GPUs.  None, if it is not known, counts as 0.
        operand_overlap: Share of the time for reading and writing the operands of matrix products that these hide, as
            ``flops`` are of large ones, which take no time for them.  None, if it is not known, counts as 1.
        host_bandwidth: Bytes per second between host and device, in each direction.
        overlap: Share of a collective's time that computation hides, if it runs beside it: 1 hides all, and less than 0
            delays both, as where they share processors.
        links: Speed of collectives.
        host_memory: Memory of the machine besides its devices, in bytes, for what is offloaded; for CPUs it is that of
            all devices.  None, if it is not known, is no limit.
        efficiency: Share of ``flops`` and ``memory_bandwidth`` that a training reaches: 1 if these are measured.
        source: Where the values come from.
    """

    name: str
    device: str
    device_type: str
    devices: int
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    operation_latency: float
    host_bandwidth: float
    overlap: float
    links: Sequence[Link]
    hook_latency: float | None = None
    host_memory: int | None = None
    page_latency: float | None = None
    operand_overlap: float | None = None
    efficiency: float = 1.0
    source: str

    def link(self, kind: CollectiveKind, ranks: int, *, crosses_machines: bool) -> Link | None:
        """Return the link that describes a collective best; None if the machine has no link of that scope.

        Args:
            kind: Kind of the collective.
            ranks: Number of its ranks.
            crosses_machines: Whether they are on several machines.
        """
        scope = "network" if crosses_machines else "machine"
        # Gloo reduces to one rank as to all, and its processors are busy as long with 1 KiB to 4 MiB of two ranks.
        kinds = ["all_reduce" if kind == "reduce" else kind, "any"]
        links = [link for link in self.links if link.scope == scope and link.kind in kinds]
        return min(links, key=lambda link: (kinds.index(link.kind), abs(link.ranks - ranks)), default=None)

    def rate(self, dtype: str) -> float:
        """Return the floating-point operations per second that a training reaches in matrix products of a dtype.

        Raises:
            RequestError: The machine does not compute in it.
        """
        if dtype not in self.flops:
            raise RequestError(
                f"machine {self.name!r} has no rate of {dtype}: choose a precision that computes in "
                f"{' or '.join(self.flops)}, or add the rate to its file"
            )
        return self.efficiency * self.flops[dtype]

    @property
    def unmeasured(self) -> list[str]:
        """Names of what counts as nothing, as it was not measured, such as by an older version."""
        names = ("hook_latency", "page_latency", "operand_overlap")
        return [name for name in names if getattr(self, name) is None]

    def to_json(self) -> str:
        """Return the text of a file for :func:`read_machine`."""
        return json.dumps(asdict(self), indent=2) + "\n"


def known_machines() -> dict[str, Machine]:
    """Return the machines of datasheets, by name."""
    return {name: _known_machine(name) for name in _known_values()}


def read_machine(name: str) -> Machine:
    """Return a known machine, or that of a file which ``dstrat measure`` has written.

    Args:
        name: Name of a known machine, or path of a file that ends with ``.json``.

    Raises:
        RequestError: There is no such machine or file, or the file describes none.
    """
    known = _known_values()
    if not name.endswith(".json"):
        if name in known:
            return _known_machine(name)
        near = nearest(name, known)
        meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise RequestError(
            f"machine {name!r} is not known: {meant}choose from {', '.join(known)}, or give the file that "
            "`dstrat measure --output machine.json` writes"
        )
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"machine {name!r} cannot be read ({error.strerror}): `dstrat measure --output {name}` writes such a file"
        ) from error
    except ValueError as error:
        raise RequestError(f"machine {name!r} is no JSON: {error}") from error
    return _machine(values, name)


@cache
def _known_values() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(_KNOWN.read_text(encoding="utf-8"))
    return values


def _known_machine(name: str) -> Machine:
    import torch

    from dstrat.training.callbacks.throughput_monitor import peak_flops

    values = _known_values()[name]
    allows_tf32 = torch.get_float32_matmul_precision() != "highest"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    peaks = {str(dtype): peak_flops(values["device"], dtype, allows_tf32=allows_tf32) for dtype in dtypes}
    flops = {dtype.removeprefix("torch."): peak for dtype, peak in peaks.items() if peak is not None}
    return _machine({"name": name, "flops": flops, **values}, str(_KNOWN))


def _machine(values: Any, source: str) -> Machine:
    names = [field.name for field in fields(Machine)]
    try:
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise RequestError(f"{source} has {unknown[0]!r}, which a machine does not have: it has {', '.join(names)}")
        machine = Machine(**{**values, "links": tuple(Link(**link) for link in values["links"])})
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{source} describes no machine ({error}): `dstrat measure --output machine.json` writes such a file"
        ) from error
    _check_numbers(machine, source)
    for link in machine.links:
        _check_number(source, "bandwidth of a link", link.bandwidth, least=0, is_exclusive=True)
        _check_number(source, "latency of a link", link.latency, least=0)
        _check_number(source, "ranks of a link", link.ranks, least=1, is_integer=True)
        for name, allowed in (("kind", _KINDS), ("scope", _SCOPES)):
            value = getattr(link, name)
            if value not in allowed:
                raise RequestError(f"{source} has a link whose {name} is {value!r}: it can be {', '.join(allowed)}")
    # JSON written by other programs has whole numbers such as 8.0.
    links = tuple(replace(link, ranks=int(link.ranks)) for link in machine.links)
    return replace(machine, devices=int(machine.devices), memory=int(machine.memory), links=links)


def _check_numbers(machine: Machine, source: str) -> None:
    """Raise a RequestError if a value of a machine is no number that it can have."""
    for name in ("devices", "memory"):
        _check_number(source, name, getattr(machine, name), least=1, is_integer=True)
    for name in ("memory_bandwidth", "host_bandwidth", "efficiency"):
        _check_number(source, name, getattr(machine, name), least=0, is_exclusive=True)
    _check_number(source, "operation_latency", machine.operation_latency, least=0)
    _check_number(source, "overlap", machine.overlap)
    for name in ("hook_latency", "page_latency", "host_memory", "operand_overlap"):
        if getattr(machine, name) is not None:
            _check_number(source, name, getattr(machine, name), least=None if name == "operand_overlap" else 0)
    if not isinstance(machine.flops, Mapping):
        raise RequestError(
            f'{source} has flops of {machine.flops!r}, which must be rates by dtype, such as {{"float32": 1e13}}'
        )
    for dtype, rate in machine.flops.items():
        _check_number(source, f"flops of {dtype}", rate, least=0, is_exclusive=True)


def _check_number(
    source: str,
    name: str,
    value: Any,
    *,
    least: int | None = None,
    is_exclusive: bool = False,
    is_integer: bool = False,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    too_small = is_number and least is not None and (value < least or (is_exclusive and value == least))
    if not is_number or too_small or (is_integer and value != int(value)):
        kind = "whole number" if is_integer else "number"
        bound = "" if least is None else f" {'above' if is_exclusive else 'of at least'} {least}"
        raise RequestError(f"{source} has {value!r} as {name}, which must be a {kind}{bound}, without a unit")
