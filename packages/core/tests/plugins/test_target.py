"""Importing the class behind an alias."""

STRATEGY = """
from dstrat.interfaces.strategy import Strategy

class Fine(Strategy):
    root_device = is_global_zero = None
    def model_to_device(self): ...
    def reduce(self, tensor, group=None, reduce_op="mean"): ...
    def broadcast(self, obj, src=0): ...
    def barrier(self, name=None): ...
    def all_gather(self, tensor, group=None, sync_grads=False): ...

class Unfinished(Strategy):
    root_device = is_global_zero = None
    def model_to_device(self): ...
    def reduce(self, tensor, group=None, reduce_op="mean"): ...
    def all_gather(self, tensor, group=None, sync_grads=False): ...

class Stranger: ...

number = 4
"""

LOAD = """
def load(name):
    offer = get_catalog().find("strategy", name)
    return getattr(attempt(get_catalog().load, offer), "__name__", None) or str(attempt(get_catalog().load, offer))
"""


def load(site, targets, **facts):
    records = [site.component(alias, target=target, **facts) for alias, target in targets.items()]
    site.add(
        "acme",
        *records,
        strategy=STRATEGY,
        bad="raise OSError('no driver')",
        wants="import not_there",
        leaves="raise SystemExit(0)",
    )
    return site.ask(f"{LOAD}\n{{name: load(name) for name in {list(targets)}}}")


def test_a_target_is_imported_and_checked(site):
    found = load(
        site,
        {
            "fine": "acme.strategy:Fine",
            "no_class": "acme.strategy:Missing",
            "no_module": "acme.gone:Fine",
            "raising": "acme.bad:Fine",
            "leaving": "acme.leaves:Fine",
            "stranger": "acme.strategy:Stranger",
            "number": "acme.strategy:number",
            "other_kind": "dstrat.interfaces.accelerator:Accelerator",
            "unfinished": "acme.strategy:Unfinished",
        },
    )
    start = "BrokenComponentError: strategy '{}' from acme 1.0 cannot be used: "
    assert found == {
        "fine": "Fine",
        "no_class": start.format("no_class")
        + "importing acme.strategy:Missing raised AttributeError: module 'acme.strategy' has no attribute 'Missing'",
        "no_module": start.format("no_module")
        + "importing acme.gone:Fine raised ModuleNotFoundError: No module named 'acme.gone'",
        "raising": start.format("raising") + "importing acme.bad:Fine raised OSError: no driver",
        "leaving": start.format("leaving") + "importing acme.leaves:Fine raised SystemExit: 0",
        "stranger": start.format("stranger")
        + "acme.strategy:Stranger is not a subclass of Strategy, which every strategy must be",
        "number": start.format("number") + "acme.strategy:number is not a class but int 4",
        "other_kind": start.format("other_kind")
        + "dstrat.interfaces.accelerator:Accelerator is not a subclass of Strategy, which every strategy must be",
        "unfinished": start.format("unfinished") + "acme.strategy:Unfinished does not implement barrier, broadcast",
    }


def test_an_import_that_fails_for_a_missing_requirement_says_so(site):
    assert load(site, {"wants": "acme.wants:Fine"}, requires=("not-there>=2",)) == {
        "wants": "MissingRequirementError: strategy 'wants' from acme 1.0 needs not-there>=2, which is not installed: "
        'pip install "not-there>=2"'
    }
