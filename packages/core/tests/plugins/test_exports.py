"""Importing the classes of plugins from dstrat's own modules, where torch is not installed."""

import pytest

STRATEGY = """
from dstrat.interfaces.strategy import Strategy

class Fast(Strategy):
    root_device = is_global_zero = None
    def model_to_device(self): ...
    def reduce(self, tensor, group=None, reduce_op="mean"): ...
    def broadcast(self, obj, src=0): ...
    def barrier(self, name=None): ...
    def all_gather(self, tensor, group=None, sync_grads=False): ...

class Faster(Fast): ...
class Options: ...
"""
PACKAGE = """
__all__ = ["Faster", "Options"]

def __getattr__(name):
    if name not in __all__:
        raise AttributeError(name)
    from acme import strategy
    return getattr(strategy, name)
"""

TAKE = """
import dstrat.accelerators, dstrat.plugins.precision, dstrat.strategies
def take(name, module="strategies"):
    try:
        exec(f"from dstrat.{module} import {name} as found", space := {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{space['found'].__module__}.{space['found'].__name__}"
"""


def take(site, *names, **environ):
    return site.ask(f"{TAKE}\n[take(name) for name in {names}]", **environ)


def test_a_class_of_any_plugin_is_imported_by_its_name(site):
    site.add("acme", site.component(target="acme.strategy:Fast"), strategy=STRATEGY)
    assert take(site, "Fast") == ["acme.strategy.Fast"]
    listed = site.ask(f"{TAKE}\n[[*dstrat.strategies.__all__], dir(dstrat.strategies), dir(dstrat.accelerators)]")
    assert "Fast" in listed[0]
    assert "Fast" in listed[1]
    assert "Fast" not in listed[2]


def test_a_star_import_brings_what_plugins_offer_and_can_be_imported(site):
    site.add("acme", site.component(kind="accelerator", target="acme.driver:Abacus"))
    site.add("lame", site.component("lame", kind="accelerator", target="lame.driver:Lame", requires=("engine>=2",)))
    star = "from dstrat.plugins.environments import *; print(SLURMEnvironment.__module__)"
    assert site.run("-c", star).stdout == "dstrat.builtin.clusters.slurm\n"
    assert site.ask(f"{TAKE}\ndstrat.accelerators.__all__.count('Abacus')") == 1
    assert site.ask(f"{TAKE}\ndstrat.accelerators.__all__.count('Lame')") == 0


def test_a_variant_without_an_alias_is_imported_from_its_plugins_package(site):
    site.add("acme", site.component(target="acme.strategy:Fast"), strategy=STRATEGY, __init__=PACKAGE)
    assert take(site, "Faster") == ["acme.strategy.Faster"]
    assert take(site, "Options")[0].startswith("ImportError: cannot import name 'Options' from 'dstrat.strategies'")


ALIASING = """
from dstrat.plugins.exports import lazy_exports

__all__ = ["Quick"]
__getattr__, __dir__ = lazy_exports(__name__, {"Quick": "dstrat.strategies:Fast"})
"""


def test_a_package_offers_the_class_of_another_under_its_name(site):
    record = site.component("quick", target="acme.strategy:Fast", requires=("acme>=1",))
    site.add("zenith", record, __init__=ALIASING)
    code = """
import zenith
try:
    found = zenith.Quick.__module__
except Exception as error:
    found = str(error)
found
"""
    assert "needs acme>=1, which is not installed" in site.ask(code)
    site.add("acme", site.component(target="acme.strategy:Fast"), strategy=STRATEGY)
    assert site.ask(code) == "acme.strategy"
    assert take(site, "Fast", "Quick") == ["acme.strategy.Fast", "acme.strategy.Fast"]


def test_a_class_of_a_known_package_that_is_not_installed_says_how_to_install_it(site):
    ddp, sharded = take(site, "DDPStrategy", "DDPShardedStrategy")
    start = "NotInstalledError: strategy 'DDPStrategy' comes with dstrat-ddp, which is not installed: "
    assert ddp == start + "pip install dstrat-ddp"
    assert sharded.endswith("comes with dstrat-fairscale, which is not installed: pip install dstrat-fairscale")
    assert site.ask(f"{TAKE}\ntake('TPUAccelerator', 'accelerators')").endswith("pip install dstrat-xla")


def test_a_class_of_a_known_package_that_does_not_work_says_why(site):
    site.add("dstrat-ddp", plugin="raise ValueError('out of order')")
    [message] = take(site, "DDPStrategy")
    assert message.endswith("comes with dstrat-ddp 1.0, which could not be loaded (ValueError: out of order)")


def test_a_class_whose_requirement_is_missing_names_it(site):
    record = site.component(target="acme.strategy:Fast", requires=("engine>=2",))
    site.add("acme", record, strategy="import engine")
    [message] = take(site, "Fast")
    assert message.startswith("MissingRequirementError: ")
    assert message.endswith('engine>=2, which is not installed: pip install "engine>=2"')


def test_a_class_name_of_two_distributions_is_an_error_that_names_both(site):
    for name in ("acme", "zenith"):
        site.add(name, site.component(name, target=f"{name}.strategy:Fast"), strategy=STRATEGY)
    [message] = take(site, "Fast")
    assert message.startswith("AmbiguousAliasError: class 'Fast' is offered by several distributions: ")
    assert message.endswith("write from acme.strategy import Fast or from zenith.strategy import Fast")


@pytest.mark.parametrize("module", ["strategies", "accelerators", "plugins.precision", "callbacks", "plugins"])
def test_an_unknown_name_is_no_attribute(site, module):
    code = f"import dstrat.{module}\n[hasattr(dstrat.{module}, 'Nonsense'), hasattr(dstrat.{module}, '__wrapped__')]"
    assert site.ask(code) == [False, False]


def test_looking_for_a_special_name_loads_no_plugin(site):
    site.add("acme", plugin="raise SystemExit(3)")
    code = "import dstrat.strategies, sys; hasattr(dstrat.strategies, '__wrapped__'); print('acme' in sys.modules)"
    assert site.run("-c", code).stdout == "False\n"
