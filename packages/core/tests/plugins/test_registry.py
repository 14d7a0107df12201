"""Registering strategies and accelerators in the running process."""

STRATEGY = """
from dstrat.interfaces.strategy import Strategy

class Fine(Strategy):
    \"\"\"A fine strategy.

    With details.
    \"\"\"

    root_device = is_global_zero = None
    def __init__(self, **arguments): self.arguments = arguments
    def model_to_device(self): ...
    def reduce(self, tensor, group=None, reduce_op="mean"): ...
    def broadcast(self, obj, src=0): ...
    def barrier(self, name=None): ...
    def all_gather(self, tensor, group=None, sync_grads=False): ...
"""

START = """
from dataclasses import asdict
from dstrat.plugins.registry import AcceleratorRegistry, StrategyRegistry
from dstrat.plugins.component import Component
from acme.strategy import Fine
"""


def ask(site, code, **environ):
    site.add(
        "acme",
        site.component("fine", "acme.strategy:Fine", starts_processes=True, accelerators=("cpu",), auto=5),
        site.component("fine_fork", "acme.strategy:Fine", notebook_safe=False, options={"start_method": "fork"}),
        strategy=STRATEGY,
        renamed="from acme.strategy import Fine",
    )
    return site.ask(START + code, **environ)


def test_a_registered_class_is_found_built_and_removed(site):
    code = """
StrategyRegistry.register("mine", Fine, description="my own", checkpoint_io="io")
seen = [find("mine"), "mine" in StrategyRegistry, StrategyRegistry.get("mine").arguments]
StrategyRegistry.remove("mine")
seen + ["mine" in StrategyRegistry, str(find("mine")).split(":")[0]]
"""
    assert ask(site, code) == ["mine@this process", True, {"checkpoint_io": "io"}, False, "UnknownAliasError"]


def test_a_record_holds_description_arguments_and_the_facts_of_the_class(site):
    code = """
StrategyRegistry.register("mine", Fine, description="my own", checkpoint_io="io")
record = StrategyRegistry["mine"]
[record.summary, dict(record.options), record.starts_processes, record.accelerators, record.auto, record.target_name]
"""
    assert ask(site, code) == ["my own", {"checkpoint_io": "io"}, True, ["cpu"], None, "acme.strategy:Fine"]


def test_facts_come_from_the_record_whose_options_agree_best(site):
    code = """
StrategyRegistry.register("forked", Fine, start_method="fork", more=1)
StrategyRegistry.register("plain", Fine, start_method="spawn")
[(r.starts_processes, r.notebook_safe) for r in map(StrategyRegistry.__getitem__, ("forked", "plain"))]
"""
    assert ask(site, code) == [[True, False], [True, False]]


def test_a_record_for_any_accelerator_describes_a_class_before_one_for_some(site):
    for name, alias in (("beads", "a_fine_one"), ("beads2", "z_fine_one")):
        site.add(name, site.component(alias, "acme.strategy:Fine", accelerators=("bead",), multi_node=False))
    site.add("general", site.component("finer", "acme.strategy:Fine", multi_node=True))
    code = """
StrategyRegistry.register("mine", Fine)
[StrategyRegistry["mine"].accelerators, StrategyRegistry["mine"].multi_node]
"""
    assert ask(site, code, DSTRAT_DISABLE_PLUGINS="acme") == [[], True]


def test_a_subclass_inherits_facts_and_given_facts_go_before_them(site):
    code = """
class Mine(Fine):
    pass
class Other: pass
StrategyRegistry.register("mine", Mine, facts={"accelerators": ("cuda",), "multi_node": True})
record = StrategyRegistry["mine"]
[record.starts_processes, record.accelerators, record.multi_node, record.summary]
"""
    assert ask(site, code) == [True, ["cuda"], True, "Mine"]


def test_the_decorator_returns_the_class(site):
    code = """
@StrategyRegistry.register("mine", description="decorated")
class Mine(Fine):
    pass
[Mine.__name__, StrategyRegistry["mine"].summary, type(StrategyRegistry.get("mine")).__name__]
"""
    assert ask(site, code) == ["Mine", "decorated", "Mine"]


def test_the_first_line_of_the_docstring_describes_what_has_no_description(site):
    assert ask(site, 'StrategyRegistry.register("mine", Fine)\nStrategyRegistry["mine"].summary') == "A fine strategy."


def test_all_aliases_are_listed(site):
    code = """
StrategyRegistry.register("mine", Fine)
[StrategyRegistry.available_strategies(), list(StrategyRegistry), len(StrategyRegistry)]
"""
    names = ["fine", "fine_fork", "mine"]
    assert ask(site, code) == [names, names, 3]


def test_a_taken_alias_is_refused_unless_it_is_to_be_replaced(site):
    code = """
refused = attempt(StrategyRegistry.register, "fine", Fine)
StrategyRegistry.register("fine", Fine, override=True, more=1)
replaced = [find("fine"), find("fine@acme"), [o.full_alias for o in get_catalog().offers("strategy")]]
StrategyRegistry.remove("fine")
[refused, *replaced, find("fine")]
"""
    assert ask(site, code) == [
        (
            "InvalidComponentError: strategy 'fine' is offered already, by acme 1.0: "
            "choose another name, or pass override=True to replace it in this process"
        ),
        "fine@this process",
        "fine@acme",
        ["fine@this process", "fine_fork@acme"],
        "fine@acme",
    ]


def test_what_cannot_be_registered_or_removed_is_refused(site):
    code = """
class Stranger: pass
[
    attempt(StrategyRegistry.register, "mine", Stranger),
    attempt(StrategyRegistry.register, "mine", 4),
    attempt(StrategyRegistry.register, "My Strategy", Fine),
    attempt(StrategyRegistry.register, "mine", Fine, facts={"colour": 1}),
    attempt(StrategyRegistry.remove, "fine"),
    attempt(StrategyRegistry.remove, "nothing"),
    attempt(StrategyRegistry.get, "nothing"),
    StrategyRegistry.get("nothing", 7),
]
"""
    answers = ask(site, code.replace("\n    ", " ").replace(",\n]", "]"))
    start = (
        "BrokenComponentError: strategy 'mine' from this process cannot be used: __main__:Stranger is not a subclass"
    )
    assert answers[0].startswith(start)
    assert answers[1] == "MisuseError: strategy 'mine' must be registered with a class, not with 4"
    assert answers[2].startswith("InvalidComponentError: alias 'My Strategy' must consist of")
    assert answers[3].startswith("InvalidComponentError: facts ['colour'] of strategy 'mine' do not exist: there are ")
    assert answers[4] == (
        "InvalidComponentError: strategy 'fine' from acme 1.0 was not registered in this process: "
        "uninstall acme, or set DSTRAT_DISABLE_PLUGINS=acme"
    )
    assert answers[5].startswith("UnknownAliasError")
    assert answers[6].startswith("UnknownAliasError")
    assert answers[7] == 7


def test_what_was_registered_outlives_a_refresh_and_counts_in_the_fingerprint(site):
    code = """
before = get_catalog().fingerprint
StrategyRegistry.register("mine", Fine)
after = get_catalog().fingerprint
refresh_catalog()
[find("mine"), before == after, after == get_catalog().fingerprint]
"""
    assert ask(site, code) == ["mine@this process", False, True]


def test_a_class_is_recognised_wherever_its_record_points(site):
    site.add(
        "acme2",
        site.component("again", "acme.renamed:Fine", max_devices=3),
    )
    code = """
import acme.renamed
StrategyRegistry.register("mine", Fine)
StrategyRegistry["mine"].max_devices
"""
    assert ask(site, code, DSTRAT_DISABLE_PLUGINS="acme") == 3


def test_accelerators_are_registered_alike(site):
    code = """
from dstrat.interfaces.accelerator import Accelerator
methods = dict.fromkeys(Accelerator.__abstractmethods__)
Abacus = AcceleratorRegistry.register("abacus", type("Abacus", (Accelerator,), methods), description="beads")
is_strategy = "abacus" in StrategyRegistry
[Abacus.__name__, "abacus" in AcceleratorRegistry, AcceleratorRegistry.available_accelerators(), is_strategy]
"""
    assert ask(site, code) == ["Abacus", True, ["abacus"], False]


def test_it_shows_and_holds_what_registries_of_strategies_are_known_for(site):
    code = """
StrategyRegistry.register("mine", Fine, description="my own", checkpoint_io="io")
item = StrategyRegistry["mine"]
values = [item["strategy"].__name__, item["description"], item["init_params"], sorted(item)]
[str(StrategyRegistry), values, sorted(StrategyRegistry.keys()), "colour" in item, "mine" in dict(StrategyRegistry)]
"""
    assert ask(site, code) == [
        "Registered Strategies: fine, fine_fork, mine",
        ["Fine", "my own", {"checkpoint_io": "io"}, ["description", "init_params", "strategy"]],
        ["fine", "fine_fork", "mine"],
        False,
        True,
    ]


def test_a_miss_is_a_key_error(site):
    code = """
def miss(function, name):
    try:
        function(name)
    except KeyError as error:
        return str(error)[:40]
[miss(f, name) for f in (StrategyRegistry.get, StrategyRegistry.__getitem__) for name in ("fin", "hivemind")]
"""
    texts = ["strategy 'fin' is not known: did you mea", "strategy 'hivemind' comes with dstrat-hi"]
    assert ask(site, code) == texts * 2
