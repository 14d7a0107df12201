"""Suite for plugins: everything that one distribution offers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.offer import THIS_PROCESS
from dstrat.plugins.settings import normalized
from dstrat.testing.suite import Suite, fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.plugins.component import Component
    from dstrat.plugins.offer import Offer


class PluginSuite(Suite):
    """Standard tests of a distribution's plugin; a test class sets :attr:`distribution`.

    Attributes:
        distribution: The name that users write after ``pip install``.
    """

    settings = Suite.settings | {"distribution"}
    distribution: ClassVar[str] = ""

    @standard("basic", "record")
    def test_an_entry_point_leads_to_it(self) -> None:
        if not plugin_modules(self.distribution):
            fail(
                f"no entry point of {self.distribution!r} is in the group dstrat.v1, so that dstrat does not find it",
                fix='write [project.entry-points."dstrat.v1"] in its pyproject.toml, and install it again.',
            )

    @standard("basic", "record")
    def test_it_is_light_to_import(self) -> None:
        for module in plugin_modules(self.distribution):
            check_module_is_light(module)

    @standard("basic", "record")
    def test_it_loads(self) -> None:
        for plugin in get_catalog().plugins:
            if normalized(plugin.distribution) == normalized(self.distribution) and plugin.state != "loaded":
                fail(f"{plugin.label} is {plugin.state}: {plugin.reason}", details=plugin.traceback)


# Check of a component's record: complete, and consistent with its class.


_LONGEST_SUMMARY = 100


def check_record(offer: Offer) -> None:
    """Fail the test where the record of a component is incomplete, or names what cannot be."""
    component = offer.component
    catalog = get_catalog()
    missing = catalog.missing_requirements(offer)
    if missing:
        fail(f"{offer.title} requires {', '.join(missing)}, which is not installed, so that nothing can be tested")
    catalog.load(offer)  # raises where the record contradicts the class, or has no class
    problems = [*_summary_problems(component), *_reference_problems(component), *_option_problems(offer)]
    if problems:
        fail(f"the record of {offer.title} {'; and '.join(problems)}", fix="correct the record in plugin.py.")


def _summary_problems(component: Component) -> Iterator[str]:
    summary = component.summary
    if not summary.strip():
        yield "has no summary"
    elif "\n" in summary or len(summary) > _LONGEST_SUMMARY:
        yield f"has a summary of {len(summary)} characters, where tables show one line of {_LONGEST_SUMMARY}"
    elif summary.endswith("."):
        yield "has a summary with a full stop at its end, which no other has"


def _reference_problems(component: Component) -> Iterator[str]:
    """Yield what the record names that nothing installed offers; hardware may come from packages that are not here."""
    offers = get_catalog().offers("precision")
    precisions = {name for offer in offers for name in (*offer.names, *offer.component.groups)}
    for name in component.precisions:
        if name not in precisions:
            yield f"names the unknown precision {name!r}: possible are {', '.join(sorted(precisions))}"
    if component.max_devices is not None and component.max_devices < 1:
        yield f"has max_devices={component.max_devices}, so that it never runs"
    if component.max_devices == 1 and component.multi_node:
        yield "says multi_node=True with max_devices=1"


def _option_problems(offer: Offer) -> Iterator[str]:
    cls = get_catalog().load(offer)
    parameters = constructor_parameters(cls)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in offer.component.options:
        if name not in parameters and not takes_any:
            yield f"presets {name!r}, which {cls.__name__} does not take"


# Check that importing a plugin does not import torch.


_GROUP = "dstrat.v1"
_PROGRAM = """
import sys, importlib, json, time
sys.path[:] = json.loads(sys.argv[2])
import dstrat.plugins.component  # which every plugin imports, so that its time is nobody's
before = set(sys.modules)
begun = time.process_time()
plugin = importlib.import_module(sys.argv[1])
records = list(plugin.dstrat_components()) if hasattr(plugin, "dstrat_components") else []
seconds = time.process_time() - begun
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "torch": "torch" in sys.modules, "heavy": [n for n in new if "." not in n]}))
"""
_SECONDS = 0.5  # of processor time, which other work of the machine does not lengthen; ours take 1 ms


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
        for point in entry_points(group=_GROUP)
        if point.dist is not None and normalized(point.dist.name) == normalized(distribution)
    ]


def check_module_is_light(module: str) -> None:
    """Fail the test where a plugin module imports torch, or takes long to import."""
    printed = _imported(module)
    if printed.startswith("failed: "):
        fail(f"the plugin module {module} cannot be imported", details=printed.removeprefix("failed: "))
    report = json.loads(printed)
    fix = (
        'import nothing but dstrat.plugins in it, name classes by "package.module:Class", and keep the package\'s '
        "__init__ lazy (a module __getattr__), as it is imported too."
    )
    if report["torch"]:
        fail(
            f"importing the plugin module {module} imports torch, which makes `dstrat strategies` and every other "
            "listing slow, for everybody who has the package installed",
            fix=fix,
        )
    if report["seconds"] > _SECONDS:
        fail(
            f"importing the plugin module {module} takes {report['seconds']:.1f} s of processor time; it imports "
            f"{', '.join(report['heavy'][:8])}",
            expected=f"less than {_SECONDS} s.",
            fix=fix,
        )


@lru_cache
def _imported(module: str) -> str:
    """Import a plugin in a fresh interpreter; return what it printed."""
    # This process has torch already.  sys.path goes with it, as a test may have extended it.
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [sys.executable, "-c", _PROGRAM, module, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr}"


# Constructor arguments of a class, including inherited ones.


def constructor_parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of each ``__init__`` that a class has or inherits, by name."""
    return {
        name: parameter
        for base in reversed(cls.__mro__[:-1])
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if name != "self"
    }
