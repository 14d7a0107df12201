"""``dstrat plugins``."""

import json

import pytest


@pytest.fixture
def plugins(site):
    site.add("good", site.component("one"), site.component("two"), site.component("hpu", kind="accelerator"))
    site.add("bad", plugin="raise ValueError('no')")
    site.add("future", group="dstrat.v2")
    site.add("off")


def test_every_plugin_is_listed_with_its_state_and_reason(plugins, dstrat):
    listing = dstrat("plugins", DSTRAT_DISABLE_PLUGINS="off")
    words = [line.split() for line in listing.stdout.splitlines()]
    assert words[0][:4] == ["distribution", "entry", "point", "state"]
    assert [line[:4] for line in words[1:]] == [
        ["bad", "1.0", "bad", "failed"],
        ["future", "1.0", "future", "unsupported"],
        ["good", "1.0", "good", "loaded"],
        ["off", "1.0", "off", "disabled"],
    ]
    assert [" ".join(line[5:]) for line in words[1:]] == [
        "ValueError: no",
        "it is written for dstrat.v2, and this dstrat has dstrat.v1: upgrade the older one",
        "accelerator 1, strategy 2",
        "named by DSTRAT_DISABLE_PLUGINS",
    ]
    assert listing.returncode == 1


def test_it_succeeds_where_all_work(site, dstrat):
    site.add("good", site.component("one"))
    site.add("empty")
    listing = dstrat("plugins")
    assert listing.returncode == 0
    assert listing.stdout.splitlines()[1].endswith("nothing")


def test_it_lists_in_strict_mode_too(plugins, dstrat):
    listing = dstrat("plugins", DSTRAT_STRICT_PLUGINS="1")
    assert "ValueError: no" in listing.stdout
    assert listing.stderr == ""
    strategies = dstrat("strategies", DSTRAT_STRICT_PLUGINS="1")
    assert strategies.returncode == 2
    assert strategies.stderr.startswith("dstrat: DSTRAT_STRICT_PLUGINS is on, and these plugins do not work: bad 1.0")


def test_a_traceback_is_printed_when_it_is_asked_for(plugins, dstrat):
    assert "Traceback" not in dstrat("plugins").stdout
    assert "bad 1.0, bad.plugin:\nTraceback" in dstrat("plugins", "--traceback").stdout


def test_a_plugin_that_imports_torch_is_flagged(site, dstrat):
    site.write("torch.py", "")
    site.add("heavy", plugin="import torch\n" + site.hook(site.component("slow")))
    listing = dstrat("plugins")
    assert "strategy 1; it imports torch, which makes every listing slow" in listing.stdout
    assert listing.returncode == 0


def test_json_holds_the_same(site, dstrat):
    site.add("acme", site.component("one"), "Tombstone(kind='strategy', alias='old', replacement='one')")
    listing = dstrat("plugins", "--json")
    (plugin,) = json.loads(listing.stdout)["plugins"]
    assert plugin.pop("seconds") < 10
    assert plugin == {
        "distribution": "acme",
        "version": "1.0",
        "entry_point": "acme",
        "group": "dstrat.v1",
        "value": "acme.plugin",
        "state": "loaded",
        "reason": "",
        "traceback": "",
        "imported_torch": False,
        "offers": [{"kind": "strategy", "alias": "one"}],
        "retired": [{"kind": "strategy", "alias": "old", "replacement": "one"}],
    }
