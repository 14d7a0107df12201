"""Install hints: the distributions of aliases and classes that are not installed.

This is the only module of the core that names strategy families.
"""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dstrat.plugins.component import Kind

    # For type checkers, which cannot load plugins; without the package, they take a class for Any.
    from dstrat_bagua import BaguaStrategy as BaguaStrategy
    from dstrat_colossalai import ColossalAILowLevelZeroStrategy as ColossalAILowLevelZeroStrategy
    from dstrat_colossalai import ColossalAIStrategy as ColossalAIStrategy
    from dstrat_colossalai import ColossalAITorchDDPStrategy as ColossalAITorchDDPStrategy
    from dstrat_colossalai import ColossalAITorchFSDPStrategy as ColossalAITorchFSDPStrategy
    from dstrat_ddp import DataParallelStrategy as DataParallelStrategy
    from dstrat_ddp import DDP2Strategy as DDP2Strategy
    from dstrat_ddp import DDPSpawnStrategy as DDPSpawnStrategy
    from dstrat_ddp import DDPStrategy as DDPStrategy
    from dstrat_deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from dstrat_diloco import DiLoCoStrategy as DiLoCoStrategy
    from dstrat_fairscale import DDPFullyShardedStrategy as DDPFullyShardedStrategy
    from dstrat_fairscale import DDPShardedStrategy as DDPShardedStrategy
    from dstrat_fairscale import DDPSpawnShardedStrategy as DDPSpawnShardedStrategy
    from dstrat_fsdp import DDPFullyShardedNativeStrategy as DDPFullyShardedNativeStrategy
    from dstrat_fsdp import FSDPStrategy as FSDPStrategy
    from dstrat_fsdp import ModelParallelStrategy as ModelParallelStrategy
    from dstrat_hivemind import HivemindStrategy as HivemindStrategy
    from dstrat_horovod import HorovodStrategy as HorovodStrategy
    from dstrat_hpu import HPUAccelerator as HPUAccelerator
    from dstrat_hpu import HPUDDPStrategy as HPUDDPStrategy
    from dstrat_hpu import HPUFSDPStrategy as HPUFSDPStrategy
    from dstrat_hpu import HPUParallelStrategy as HPUParallelStrategy
    from dstrat_hpu import SingleHPUStrategy as SingleHPUStrategy
    from dstrat_ipu import IPUAccelerator as IPUAccelerator
    from dstrat_ipu import IPUStrategy as IPUStrategy
    from dstrat_mesh import MeshStrategy as MeshStrategy
    from dstrat_torchao import Float8Precision as Float8Precision
    from dstrat_torchao import QuantizedWeightsPrecision as QuantizedWeightsPrecision
    from dstrat_torchao import TransformerEnginePrecision as TransformerEnginePrecision
    from dstrat_torchft import TorchFTDiLoCoStrategy as TorchFTDiLoCoStrategy
    from dstrat_torchft import TorchFTStrategy as TorchFTStrategy
    from dstrat_xla import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from dstrat_xla import SingleTPUStrategy as SingleTPUStrategy
    from dstrat_xla import TPUAccelerator as TPUAccelerator
    from dstrat_xla import TPUSpawnStrategy as TPUSpawnStrategy
    from dstrat_xla import XLAAccelerator as XLAAccelerator
    from dstrat_xla import XLAFSDPStrategy as XLAFSDPStrategy
    from dstrat_xla import XLASPMDStrategy as XLASPMDStrategy
    from dstrat_xla import XLAStrategy as XLAStrategy

_ACCELERATORS = {
    "hpu": "dstrat-hpu",
    "ipu": "dstrat-ipu",
    "tpu": "dstrat-xla",
    "xla": "dstrat-xla",
}

_CLUSTER_ENVIRONMENTS = {
    "ray_train": "dstrat-ray",
}

_LAUNCHERS = {
    "ray": "dstrat-ray",
}

_PRECISIONS = {
    "float8": "dstrat-torchao",
    "float8-rowwise": "dstrat-torchao",
    "float8-rowwise-gw-hp": "dstrat-torchao",
    "int8-weights": "dstrat-torchao",
    "nf4-weights": "dstrat-torchao",
    "transformer-engine": "dstrat-torchao",
}

_STRATEGIES = {
    "bagua": "dstrat-bagua",
    "collaborative": "dstrat-hivemind",
    "colossalai": "dstrat-colossalai",
    "colossalai_low_level_zero": "dstrat-colossalai",
    "colossalai_torch_ddp": "dstrat-colossalai",
    "colossalai_torch_fsdp": "dstrat-colossalai",
    "ddp": "dstrat-ddp",
    "ddp2": "dstrat-ddp",
    "ddp_find_unused_parameters_false": "dstrat-ddp",
    "ddp_find_unused_parameters_true": "dstrat-ddp",
    "ddp_fork": "dstrat-ddp",
    "ddp_fork_find_unused_parameters_false": "dstrat-ddp",
    "ddp_fork_find_unused_parameters_true": "dstrat-ddp",
    "ddp_fully_sharded": "dstrat-fairscale",
    "ddp_notebook": "dstrat-ddp",
    "ddp_notebook_find_unused_parameters_false": "dstrat-ddp",
    "ddp_notebook_find_unused_parameters_true": "dstrat-ddp",
    "ddp_sharded": "dstrat-fairscale",
    "ddp_sharded_find_unused_parameters_false": "dstrat-fairscale",
    "ddp_sharded_spawn": "dstrat-fairscale",
    "ddp_sharded_spawn_find_unused_parameters_false": "dstrat-fairscale",
    "ddp_spawn": "dstrat-ddp",
    "ddp_spawn_find_unused_parameters_false": "dstrat-ddp",
    "ddp_spawn_find_unused_parameters_true": "dstrat-ddp",
    "deepspeed": "dstrat-deepspeed",
    "deepspeed_stage_0": "dstrat-deepspeed",
    "deepspeed_stage_1": "dstrat-deepspeed",
    "deepspeed_stage_1_offload": "dstrat-deepspeed",
    "deepspeed_stage_2": "dstrat-deepspeed",
    "deepspeed_stage_2_offload": "dstrat-deepspeed",
    "deepspeed_stage_3": "dstrat-deepspeed",
    "deepspeed_stage_3_offload": "dstrat-deepspeed",
    "deepspeed_stage_3_offload_nvme": "dstrat-deepspeed",
    "diloco": "dstrat-diloco",
    "dp": "dstrat-ddp",
    "fsdp": "dstrat-fsdp",
    "fsdp_cpu_offload": "dstrat-fsdp",
    "fsdp_hybrid_shard": "dstrat-fsdp",
    "fsdp_native": "dstrat-fsdp",
    "fsdp_native_full_shard_offload": "dstrat-fsdp",
    "hivemind": "dstrat-hivemind",
    "horovod": "dstrat-horovod",
    "hpu_ddp": "dstrat-hpu",
    "hpu_fsdp": "dstrat-hpu",
    "hpu_parallel": "dstrat-hpu",
    "hpu_single": "dstrat-hpu",
    "ipu_strategy": "dstrat-ipu",
    "mesh": "dstrat-mesh",
    "model_parallel": "dstrat-fsdp",
    "single_tpu": "dstrat-xla",
    "single_xla": "dstrat-xla",
    "torchft_ddp": "dstrat-torchft",
    "torchft_diloco": "dstrat-torchft",
    "tpu_spawn": "dstrat-xla",
    "tpu_spawn_debug": "dstrat-xla",
    "xla": "dstrat-xla",
    "xla_debug": "dstrat-xla",
    "xla_fsdp": "dstrat-xla",
    "xla_spmd": "dstrat-xla",
}

_ACCELERATOR_CLASSES = {
    "HPUAccelerator": "dstrat-hpu",
    "IPUAccelerator": "dstrat-ipu",
    "TPUAccelerator": "dstrat-xla",
    "XLAAccelerator": "dstrat-xla",
}

_PRECISION_CLASSES = {
    "Float8Precision": "dstrat-torchao",
    "QuantizedWeightsPrecision": "dstrat-torchao",
    "TransformerEnginePrecision": "dstrat-torchao",
}

_STRATEGY_CLASSES = {
    "BaguaStrategy": "dstrat-bagua",
    "ColossalAILowLevelZeroStrategy": "dstrat-colossalai",
    "ColossalAIStrategy": "dstrat-colossalai",
    "ColossalAITorchDDPStrategy": "dstrat-colossalai",
    "ColossalAITorchFSDPStrategy": "dstrat-colossalai",
    "DDP2Strategy": "dstrat-ddp",
    "DDPFullyShardedNativeStrategy": "dstrat-fsdp",
    "DDPFullyShardedStrategy": "dstrat-fairscale",
    "DDPShardedStrategy": "dstrat-fairscale",
    "DDPSpawnShardedStrategy": "dstrat-fairscale",
    "DDPSpawnStrategy": "dstrat-ddp",
    "DDPStrategy": "dstrat-ddp",
    "DataParallelStrategy": "dstrat-ddp",
    "DeepSpeedStrategy": "dstrat-deepspeed",
    "DiLoCoStrategy": "dstrat-diloco",
    "FSDPStrategy": "dstrat-fsdp",
    "HPUDDPStrategy": "dstrat-hpu",
    "HPUFSDPStrategy": "dstrat-hpu",
    "HPUParallelStrategy": "dstrat-hpu",
    "HivemindStrategy": "dstrat-hivemind",
    "HorovodStrategy": "dstrat-horovod",
    "IPUStrategy": "dstrat-ipu",
    "MeshStrategy": "dstrat-mesh",
    "ModelParallelStrategy": "dstrat-fsdp",
    "SingleDeviceXLAStrategy": "dstrat-xla",
    "SingleHPUStrategy": "dstrat-hpu",
    "SingleTPUStrategy": "dstrat-xla",
    "TPUSpawnStrategy": "dstrat-xla",
    "TorchFTDiLoCoStrategy": "dstrat-torchft",
    "TorchFTStrategy": "dstrat-torchft",
    "XLAFSDPStrategy": "dstrat-xla",
    "XLASPMDStrategy": "dstrat-xla",
    "XLAStrategy": "dstrat-xla",
}

KNOWN: Mapping[Kind, Mapping[str, str]] = {
    "accelerator": _ACCELERATORS,
    "cluster_environment": _CLUSTER_ENVIRONMENTS,
    "launcher": _LAUNCHERS,
    "precision": _PRECISIONS,
    "strategy": _STRATEGIES,
}
"""Requirement for ``pip install`` by kind and alias, in alphabetical order."""

KNOWN_CLASSES: Mapping[Kind, Mapping[str, str]] = {
    "accelerator": _ACCELERATOR_CLASSES,
    "precision": _PRECISION_CLASSES,
    "strategy": _STRATEGY_CLASSES,
}
"""Requirement for ``pip install`` by kind and class name, in alphabetical order."""

KNOWN_ADAPTERS: Mapping[str, str] = {
    "lightning": "dstrat-lightning",
    "peft": "dstrat-transformers",
    "pytorch_lightning": "dstrat-lightning",
    "transformers": "dstrat-transformers",
}
"""Requirement for ``pip install`` that converts objects of a library, by the library's package."""

_DISTRIBUTIONS = frozenset({*KNOWN_ADAPTERS.values(), *(name for table in KNOWN.values() for name in table.values())})

FOR_SEVERAL_DEVICES = "ddp"
"""Alias of the strategy that is suggested for several devices or processes."""


def known_requirement(kind: Kind, alias: str) -> str | None:
    """Return the requirement for ``pip install`` that offers an alias; None if unknown."""
    return KNOWN.get(kind, {}).get(alias)


def known_class(kind: Kind, name: str) -> str | None:
    """Return the requirement for ``pip install`` that has a class; None if unknown."""
    return KNOWN_CLASSES.get(kind, {}).get(name)


def known_adapter(cls: type) -> str | None:
    """Return the requirement for ``pip install`` that converts objects of a class; None if unknown."""
    packages = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((KNOWN_ADAPTERS[package] for package in packages if package in KNOWN_ADAPTERS), None)


def known_distribution(requirement: str) -> str:
    """Return the name of a requirement's distribution, without its extra."""
    return requirement.partition("[")[0]


# The command that installs a requirement


_NAME_AND_EXTRAS = re.compile(r"(dstrat-[a-z]+)(?![\w.-])(\[[^]]*\])?")


def pip_command(*requirements: str, upgrade: bool = False, options: Iterable[str] = ()) -> str:
    """Return the command that installs the requirements, quoted for a shell."""
    sources = (quoted(_source(requirement)) for requirement in requirements)
    return " ".join(["pip install", *(["--upgrade"] if upgrade else []), *options, *sources])


def quoted(requirement: str) -> str:
    """Return the requirement, quoted for a shell if needed."""
    return f'"{requirement}"' if set(requirement) & set("[]<>=!~; &()'#*?") else requirement


def _source(requirement: str) -> str:
    """Return what pip installs a requirement from: a package of ours comes from where the core was installed from.

    The index may not have it, or another version.  It is the folder, or wheel, beside that of the core.
    """
    match = _NAME_AND_EXTRAS.match(requirement)
    origin = origin_of("dstrat")
    if match is None or match[1] not in _DISTRIBUTIONS or "url" not in origin:
        return requirement
    name, extras = match[1], match[2] or ""
    url = urlsplit(origin["url"])
    folder_name = name.removeprefix("dstrat-")
    if core := origin.get("subdirectory"):  # of a repository or an archive
        folder = PurePosixPath(core).with_name(folder_name)
        named = f"{name}{extras} @ " if extras else ""  # which pip refuses for git+file, and needs for extras only
        return f"{named}{_repository(origin)}#subdirectory={folder}"
    if url.scheme != "file":
        return requirement
    beside = Path(unquote(url.path)).parent
    if "dir_info" not in origin:
        wheels = beside.glob(f"{name.replace('-', '_')}-*.whl")
        newest = max(wheels, key=lambda wheel: wheel.stat().st_mtime, default=None)
        return requirement if newest is None else f"{_short(newest)}{extras}"
    package = beside / folder_name
    return f"{_short(package)}{extras}" if (package / "pyproject.toml").is_file() else requirement


def origin_of(name: str) -> Mapping[str, Any]:
    """Return what ``direct_url.json`` of a distribution records (PEP 610); empty where it comes from an index."""
    try:
        recorded = json.loads(distribution(name).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _repository(origin: Mapping[str, Any]) -> str:
    """Return the URL of the repository at the revision that the core was asked for with, as pip takes it."""
    if "vcs_info" not in origin:
        return str(origin["url"])
    revision = origin["vcs_info"].get("requested_revision")
    return f"{origin['vcs_info']['vcs']}+{origin['url']}{f'@{revision}' if revision else ''}"


def _short(path: Path) -> str:
    """Return the path from the working directory if it is below it, and the absolute one otherwise."""
    try:
        return os.path.join(".", path.relative_to(Path.cwd()))  # noqa: PTH118 - a Path drops the dot, which pip needs
    except (OSError, ValueError):  # the working directory may have been removed
        return str(path)
