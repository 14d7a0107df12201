"""What becomes of plugins, good and bad."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dstrat.plugins.offer import named_import

BROKEN = {
    "raises when it is imported": ("raise ValueError('out of\\n  order')", "ValueError: out of order"),
    "has a syntax error": ("def broken(:", "SyntaxError: invalid syntax"),
    "leaves the interpreter": ("raise SystemExit(3)", "SystemExit: 3"),
    "imports what is missing": ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
    "has no hook": ("", "InvalidComponentError: it does not implement dstrat_components"),
    "forgets the marker": (
        "def dstrat_components():\n    return []",
        "InvalidComponentError: it defines dstrat_components without marking it with @hookimpl",
    ),
    "misspells the hook": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_component():\n    return []",
        "PluginValidationError: unknown hook 'dstrat_component'",
    ),
    "wants arguments": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_components(config):\n    return []",
        "PluginValidationError",
    ),
    "raises in the hook": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_components():\n    return 1 / 0",
        "ZeroDivisionError: division by zero",
    ),
    "returns nothing": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_components():\n    pass",
        "dstrat_components returned None, not a list of Component records",
    ),
    "returns a text": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_components():\n    return 'ddp'",
        "dstrat_components returned 'ddp', not a list",
    ),
    "returns a list of rubbish": (
        "from dstrat.plugins.component import hookimpl\n@hookimpl\ndef dstrat_components():\n    return [{}]",
        "dstrat_components returned {} in its list, not a Component record",
    ),
    "uses a fact that does not exist": (
        "from dstrat.plugins.component import Component\nComponent(kind='strategy', alias='a', target='a:B', colour=1)",
        "TypeError: Component.__init__() got an unexpected keyword argument 'colour'",
    ),
    "has an alias that is none": (
        (
            "from dstrat.plugins.component import Component\n"
            "Component(kind='strategy', alias='A b', target='a:B', summary='s')"
        ),
        "InvalidComponentError: alias 'A b' must consist of lower-case letters",
    ),
    **{
        f"has {name} {value!r}": (
            (
                "from dstrat.plugins.component import Component\n"
                f"Component(**{{**dict(kind='strategy', alias='a', target='a:B', summary='s'), {name!r}: {value!r}}})"
            ),
            f"InvalidComponentError: {name} of strategy 'a' must be {expected}, and is {value!r}",
        )
        for name, value, expected in [
            ("requires", (3,), "a tuple of strings"),
            ("requires", "engine>=1", "a tuple of strings"),
            ("summary", None, "a string"),
            ("auto", "high", "a whole number or None"),
            ("auto", 1.5, "a whole number or None"),
            ("options", [("a", 1)], "a dict of arguments by their names"),
            ("starts_processes", "yes", "True, False or None"),
            ("strategies", {"ddp": 1}, "a dict of aliases by aliases"),
            ("target", None, "a string or a class"),
        ]
    },
    "asks for the catalog while it is loaded": (
        "from dstrat.plugins.catalog import get_catalog\nget_catalog()",
        "PluginError: the catalog is being built",
    ),
}


def test_each_way_to_break_a_plugin_is_reported_and_the_others_work(site):
    names = {f"bad-{number:02}": text for number, text in enumerate(BROKEN)}
    for name, text in names.items():
        site.add(name, plugin=BROKEN[text][0])
    site.add("good", site.component("fine"))

    states, reasons, found = site.ask("states(), reasons(), find('fine')")

    assert found == "fine@good"
    assert states == {"good:good": "loaded", **{f"{name}:{name}": "failed" for name in names}}
    for name, text in names.items():
        assert reasons[name].startswith(BROKEN[text][1]) or BROKEN[text][1] in reasons[name], text
        assert "\n" not in reasons[name]


def test_a_failed_plugin_keeps_its_traceback(site):
    site.add("bad", plugin="def deep():\n    raise ValueError('here')\ndeep()")
    assert "in deep" in site.ask("get_catalog().plugins[0].traceback")


def test_a_plugin_that_speaks_another_version_is_not_loaded(site):
    site.add("future", plugin="raise ValueError('never imported')", group="dstrat.v2")
    states, reasons = site.ask("states(), reasons()")
    assert states == {"future:future": "unsupported"}
    assert reasons["future"] == "it is written for dstrat.v2, and this dstrat has dstrat.v1: upgrade the older one"


def test_a_distribution_that_speaks_several_versions_is_loaded_once(site):
    site.add("both", site.component("fine"))
    with (site.folder / "both-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("[dstrat.v2]\nboth = both.plugin2\n")
    assert site.ask("states()") == {"both:both": "loaded"}


def test_entry_points_of_one_name_are_all_loaded(site):
    for name in ("one", "two"):
        site.add(name, site.component(name), entry_points=[("same", f"{name}.plugin")])
    site.add(
        "three",
        site.component("three"),
        entry_points=[("same", "three.plugin"), ("same", "three.other")],
        other=site.hook(site.component("other")),
    )
    found = site.ask("[(p.distribution, p.value, p.state) for p in get_catalog().plugins]")
    assert found == [
        ["one", "one.plugin", "loaded"],
        ["three", "three.other", "loaded"],
        ["three", "three.plugin", "loaded"],
        ["two", "two.plugin", "loaded"],
    ]


def test_a_plugin_may_be_an_object_of_a_module(site):
    source = "class Offer:\n    @hookimpl\n    def dstrat_components(self):\n        return [%s]\noffer = Offer()"
    site.add(
        "objects",
        plugin="from dstrat.plugins.component import Component\nfrom dstrat.plugins.component import hookimpl\n"
        + source % site.component("fine"),
        entry_points=[("objects", "objects.plugin:offer")],
    )
    assert site.ask("find('fine')") == "fine@objects"


def test_an_alias_twice_in_one_plugin_is_the_plugins_failure(site):
    site.add("twice", site.component("fine"), site.component("fast", synonyms=("fine",)))
    assert site.ask("reasons()") == {"twice": "InvalidComponentError: dstrat_components returned strategy 'fine' twice"}


def test_an_alias_twice_in_one_distribution_is_the_second_plugins_failure(site):
    site.add(
        "twice",
        site.component("fine"),
        entry_points=[("b", "twice.plugin"), ("a", "twice.other")],
        other=site.hook(site.component("fine", target="twice.other:Fine")),
    )
    states, reasons, found = site.ask("states(), reasons(), find('fine')")
    assert states == {"twice:a": "loaded", "twice:b": "failed"}
    assert reasons["twice"] == "it repeats strategy 'fine' of entry point 'a' of the same distribution"
    assert found == "fine@twice"


def test_one_alias_may_name_components_of_several_kinds(site):
    site.add("many", site.component("hpu"), site.component("hpu", kind="accelerator"))
    assert site.ask("find('hpu'), find('hpu', 'accelerator')") == ["hpu@many", "hpu@many"]


def test_importing_torch_is_flagged_and_changes_nothing_else(site):
    site.write("torch.py", "")
    site.add("heavy", plugin="import torch\n" + site.hook(site.component("slow")))
    site.add("light", site.component("fine"))
    flags, found = site.ask("{p.distribution: p.imported_torch for p in get_catalog().plugins}, find('slow')")
    assert flags == {"heavy": True, "light": False}
    assert found == "slow@heavy"


def test_listing_imports_neither_torch_nor_the_classes(site):
    site.add("light", site.component("fine", target="light.strategy:Fine"), strategy="raise ValueError('imported')")
    modules = site.ask(
        "find('fine')\n[name for name in sys.modules if name.split('.')[0] in ('torch', 'light', 'rich')]"
    )
    assert modules == ["light", "light.plugin"]


@pytest.mark.parametrize("spelling", ["acme-ddp", "Acme_DDP", " other , ACME.ddp"])
def test_a_disabled_plugin_is_not_imported(site, spelling):
    site.add("acme-ddp", plugin="raise ValueError('never imported')")
    states, reasons = site.ask("states(), reasons()", DSTRAT_DISABLE_PLUGINS=spelling)
    assert states == {"acme-ddp:acme-ddp": "disabled"}
    assert reasons == {"acme-ddp": "named by DSTRAT_DISABLE_PLUGINS"}


def test_malformed_metadata_of_a_stranger_is_not_our_problem(site):
    site.write("stranger-1.dist-info/METADATA", "Name: stranger\nVersion: 1\n")
    site.write("stranger-1.dist-info/entry_points.txt", "[console_scripts]\nno equals sign\n")
    (site.folder / "latin-1.dist-info").mkdir()
    (site.folder / "latin-1.dist-info/entry_points.txt").write_bytes(b"[console_scripts]\n\xff = x\n")
    site.add("good", site.component("fine"))
    assert site.ask("states()") == {"good:good": "loaded"}


def test_malformed_metadata_of_a_plugin_is_its_failure(site):
    site.add("good", site.component("fine"))
    site.add("mangled", site.component("other"))
    site.write("mangled-1.0.dist-info/entry_points.txt", "[dstrat.v1]\nno equals sign\n")
    states = site.ask("{p.distribution: p.state for p in get_catalog().plugins}")
    assert states == {"good": "loaded", "mangled": "failed"}


def test_an_entry_point_without_a_usable_value_is_a_failure(site):
    site.add("odd", entry_points=[("odd", "not a module!")])
    assert site.ask("states()") == {"odd:odd": "failed"}


def test_of_two_installed_versions_the_first_on_the_path_counts(site, tmp_path):
    site.add("acme", site.component("new"), version="2.0")
    site.write("older/acme-1.0.dist-info/METADATA", "Name: acme\nVersion: 1.0\n")
    site.write("older/acme-1.0.dist-info/entry_points.txt", "[dstrat.v1]\nacme = acme.gone\n")
    found = site.ask("import sys\nsys.path.append('older')\n[(p.label, p.state) for p in get_catalog().plugins]")
    assert found == [["acme 2.0", "loaded"]]


def test_a_plugin_of_an_older_version_that_is_hidden_on_the_path_is_not_there(site):
    site.write("acme-2.0.dist-info/METADATA", "Name: acme\nVersion: 2.0\n")
    site.write("older/acme-1.0.dist-info/METADATA", "Name: acme\nVersion: 1.0\n")
    site.write("older/acme-1.0.dist-info/entry_points.txt", "[dstrat.v1]\nacme = acme.gone\n")
    assert site.ask("import sys\nsys.path.append('older')\nstates()") == {}


HANGING = """
import pathlib, time
pathlib.Path("importing").touch()
time.sleep(600)
"""


def test_a_plugin_whose_import_hangs_is_named_when_it_is_interrupted(site):
    site.add("acme-beads", plugin=HANGING)
    path = os.pathsep.join([str(site.folder), str(site.bare)])
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in the background
    code = f"{handler}from dstrat.plugins.catalog import get_catalog; get_catalog()"
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, env=environ, cwd=site.folder, stderr=subprocess.PIPE, text=True) as program:
        while not (site.folder / "importing").exists():
            assert program.poll() is None
            time.sleep(0.02)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=400)
    assert (
        "dstrat: importing acme_beads.plugin of acme-beads was interrupted; "
        "DSTRAT_DISABLE_PLUGINS=acme-beads leaves it out\n"
    ) in errors
    assert "KeyboardInterrupt" in errors


def test_an_import_that_takes_long_is_named_and_goes_on(capfd):
    with named_import("acme.plugin", "acme", seconds=0.01):
        line = ""
        while not line.endswith("\n"):
            time.sleep(0.01)
            line += capfd.readouterr().err
    assert line == (
        "dstrat: importing acme.plugin of acme has taken 0.01 s and continues; "
        "DSTRAT_DISABLE_PLUGINS=acme leaves it out\n"
    )


def test_an_import_that_is_quick_is_not_named(capfd):
    with named_import("acme.plugin", "acme", seconds=60):
        pass
    assert capfd.readouterr().err == ""
