"""Facts that a record declares, facts that its class adds, and the two in contradiction."""

CLASSES = """
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.strategy import Strategy

class Alone(Strategy):
    root_device = is_global_zero = None
    def __init__(self, **arguments): super().__init__()
    def model_to_device(self): ...
    def reduce(self, tensor, group=None, reduce_op="mean"): ...
    def broadcast(self, obj, src=0): ...
    def barrier(self, name=None): ...
    def all_gather(self, tensor, group=None, sync_grads=False): ...

class Many(Alone):
    start_method = "popen"
    uses_torch_distributed = True

class Rows(Alone):
    drives_several_devices = True

class Beads(Accelerator):
    process_group_backend = "hccl"
    devices_share_process = False
    def is_available(self): ...
    def auto_device_count(self): ...
    def parse_devices(self, devices): ...
    def get_parallel_devices(self, indices): ...

class Mute(Beads):
    process_group_backend = "none"

class Late(Beads):
    @property
    def process_group_backend(self): return "gloo"
"""

START = """
from acme.classes import Alone, Beads, Late, Many, Mute, Rows
from dstrat.plugins.facts import declares_all, with_class_facts
from dstrat.plugins.registry import AcceleratorRegistry, StrategyRegistry

def facts(alias, *names, kind="strategy"):
    offer = get_catalog().find(kind, alias)
    record = with_class_facts(offer.component, get_catalog().load(offer))
    return [getattr(record, name) for name in names]

def load(alias, kind="strategy"):
    return str(attempt(lambda: get_catalog().load(get_catalog().find(kind, alias)).__name__))
"""

LAUNCHING = '"starts_processes", "notebook_safe", "multi_node", "uses_torch_distributed", "drives_several_devices"'


def ask(site, code, *records):
    site.add("acme", *records, classes=CLASSES)
    return site.ask(START + code)


def test_facts_that_a_record_leaves_out_are_those_of_its_class(site):
    targets = {"alone": "Alone", "many": "Many", "rows": "Rows"}
    records = [site.component(alias, f"acme.classes:{name}") for alias, name in targets.items()]
    forked = site.component("forked", "acme.classes:Many", options={"start_method": "fork"})
    code = f"{{alias: facts(alias, {LAUNCHING}) for alias in ('alone', 'many', 'rows', 'forked')}}"
    assert ask(site, code, *records, forked) == {
        "alone": [False, True, False, False, False],
        "many": [True, False, True, True, False],
        "rows": [False, True, False, False, True],
        "forked": [True, True, True, True, False],
    }


def test_what_a_record_declares_stays(site):
    record = site.component("many", "acme.classes:Many", multi_node=False, notebook_safe=True)
    assert ask(site, 'facts("many", "multi_node", "notebook_safe")', record) == [False, True]


def test_a_class_that_is_registered_brings_its_facts(site):
    code = f"""
StrategyRegistry.register("mine", Many)
StrategyRegistry.register("forked", Many, start_method="fork")
[facts(alias, {LAUNCHING}) for alias in ("mine", "forked")] + [declares_all(StrategyRegistry["mine"])]
"""
    assert ask(site, code) == [[True, False, True, True, False], [True, True, True, True, False], True]


def test_the_collectives_of_hardware_are_those_of_its_class(site):
    records = [
        site.component(name.lower(), f"acme.classes:{name}", kind="accelerator") for name in ("Beads", "Mute", "Late")
    ]
    names = '"process_group_backend", "supports_torch_distributed", "devices_share_process"'
    code = f"{{alias: facts(alias, {names}, kind='accelerator') for alias in ('beads', 'mute', 'late')}}"
    assert ask(site, code, *records) == {
        "beads": ["hccl", True, False],
        "mute": ["none", False, False],
        "late": [None, None, False],
    }


def test_a_record_that_contradicts_its_class_is_refused(site):
    wrong = {
        "many": ("Many", {"starts_processes": False}, "starts_processes=False, and Many has start_method='popen'"),
        "mail": (
            "Many",
            {"uses_torch_distributed": False},
            "uses_torch_distributed=False, and Many has uses_torch_distributed=True",
        ),
        "rows": (
            "Rows",
            {"drives_several_devices": False},
            "drives_several_devices=False, and Rows has drives_several_devices=True",
        ),
        "beads": (
            "Beads",
            {"kind": "accelerator", "process_group_backend": "gloo"},
            "process_group_backend='gloo', and Beads has process_group_backend='hccl'",
        ),
    }
    records = [site.component(alias, f"acme.classes:{name}", **facts) for alias, (name, facts, _) in wrong.items()]
    code = f"{{alias: load(alias, 'accelerator' if alias == 'beads' else 'strategy') for alias in {list(wrong)}}}"
    found = ask(site, code, *records)
    for alias, (_, _, text) in wrong.items():
        kind = "accelerator" if alias == "beads" else "strategy"
        start = f"BrokenComponentError: {kind} '{alias}' from acme 1.0 cannot be used: its record says "
        assert found[alias] == start + text


def test_a_fact_that_contradicts_the_class_is_not_registered(site):
    code = """
refused = attempt(StrategyRegistry.register, "mine", Many, facts={"starts_processes": False})
[str(refused), "mine" in StrategyRegistry]
"""
    message, is_registered = ask(site, code)
    assert message == (
        "BrokenComponentError: strategy 'mine' from this process cannot be used: its record says "
        "starts_processes=False, and Many has start_method='popen'"
    )
    assert not is_registered
