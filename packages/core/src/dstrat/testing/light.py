"""Check that importing a plugin does not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from dstrat.plugins.names import normalized
from dstrat.plugins.offer import THIS_PROCESS
from dstrat.testing.advice import fail
from dstrat.testing.skips import not_declared

if TYPE_CHECKING:
    from dstrat.plugins.offer import Offer

GROUP = "dstrat.v1"
_PROGRAM = """
import sys, importlib, json, time
sys.path[:] = json.loads(sys.argv[2])
import dstrat.plugins.component, dstrat.plugins.hookspec
before = set(sys.modules)
begun = time.process_time()
plugin = importlib.import_module(sys.argv[1])
records = list(plugin.dstrat_components()) if hasattr(plugin, "dstrat_components") else []
seconds = time.process_time() - begun
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "torch": "torch" in sys.modules, "heavy": [n for n in new if "." not in n]}))
"""
_SECONDS = 0.5  # of processor time; ours take 1 ms


def check_light(offer: Offer) -> None:
    """Fail the test where importing the plugin of a component imports torch, or takes long."""
    if offer.owner == THIS_PROCESS:
        not_declared("registered in this process: there is no plugin to import")
    for module in plugin_modules(offer.owner):
        check_module_is_light(module)


def plugin_modules(distribution: str) -> list[str]:
    """Return the modules that a distribution's entry points name."""
    return [
        point.module
        for point in entry_points(group=GROUP)
        if point.dist is not None and normalized(point.dist.name) == normalized(distribution)
    ]


def check_module_is_light(module: str) -> None:
    """Fail the test where a plugin module imports torch, or takes long to import."""
    printed = _imported(module)
    if printed.startswith("failed: "):
        fail(f"the plugin module {module} cannot be imported", details=printed.removeprefix("failed: "))
    found = json.loads(printed)
    cure = (
        'import nothing but dstrat.plugins in it, name classes by "package.module:Class", and keep the package\'s '
        "__init__ lazy (a module __getattr__), as it is imported too."
    )
    if found["torch"]:
        fail(
            f"importing the plugin module {module} imports torch, which makes `dstrat strategies` and every other "
            "listing slow, for everybody who has the package installed",
            cure=cure,
        )
    if found["seconds"] > _SECONDS:
        fail(
            f"importing the plugin module {module} takes {found['seconds']:.1f} s of processor time; it imports "
            f"{', '.join(found['heavy'][:8])}",
            expected=f"less than {_SECONDS} s.",
            cure=cure,
        )


@lru_cache
def _imported(module: str) -> str:
    """Import a plugin in a fresh interpreter; return what it printed."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [sys.executable, "-c", _PROGRAM, module, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr}"
