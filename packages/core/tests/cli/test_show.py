"""``dstrat show``."""

import json

import pytest

SOURCE = '''
raise ValueError("never imported")

class Fast(Base):
    """A fast strategy.

    With details.
    """
'''


def facts(text):
    return dict(line.split("  ", 1) for line in text.splitlines() if line)


def test_all_facts_are_shown_without_importing_the_class(site, dstrat):
    record = site.component(
        "fast",
        "acme.deep.strategy:Fast",
        synonyms=("quick",),
        requires=("engine>=2", "packaging-is-not-here"),
        options={"level": 3, "name": "x"},
        accelerators=("cpu", "cuda"),
        device_types=("cpu",),
        uses_torch_distributed=True,
        starts_processes=True,
        multi_node=True,
        notebook_safe=False,
        max_devices=8,
        auto=5,
    )
    site.add("acme", record)
    site.write("acme/deep/__init__.py", "raise ValueError('never imported')")
    site.write("acme/deep/strategy.py", SOURCE)
    site.write("engine-2.1.dist-info/METADATA", "Name: engine\nVersion: 2.1\n")

    shown = dstrat("show", "quick")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert {name.strip(): text.strip() for name, text in facts(shown.stdout).items()} == {
        "strategy": "fast",
        "also called": "quick",
        "what it is": "for tests",
        "from": "acme 1.0",
        "class": "acme.deep.strategy.Fast",
        "docstring": "A fast strategy.",
        "preset": "level=3, name='x'",
        "requires": "engine>=2, packaging-is-not-here (missing)",
        "accelerators": "cpu, cuda",
        "device types": "cpu",
        "collectives": "through torch.distributed",
        "precisions": "any",
        "devices": "at most 8",
        "processes": "one per device",
        "machines": "several",
        "notebooks": "no",
        "guide": "https://pypi.org/project/acme/",
        "automatic": "rank 5, the highest is chosen",
    }


OPTIONS = '''
from acme.base import Base
from datetime import timedelta

class Fast(Base):
    """A fast strategy."""
'''

BASE = '''
raise ValueError("never imported")
PATIENCE = timedelta(minutes=30)

class Base(object):
    """All of them.

    Args:
        level: How fast: ``1`` is slow,
            ``2`` is fast.
        accelerator: The hardware.
        **others: Refused.

    Raises:
        ValueError: It is not.
    """

    def __init__(self, name: str, level: int = 1, accelerator: "Accelerator | None" = None,
                 *, timeout: "timedelta | None" = PATIENCE, shape=(1, 2), must: int, **others):
        pass
'''


def test_options_are_shown_with_defaults_types_and_texts(site, dstrat):
    site.add("acme", site.component("fast", "acme.strategy:Fast"), strategy=OPTIONS, base=BASE)
    assert dstrat("show", "fast").stdout.partition("\n\n")[2].split("\n") == [
        "options of Fast, with their defaults:",
        "  level=1                        How fast: 1 is slow, 2 is fast. (int)",
        "  timeout=timedelta(minutes=30)  (timedelta | None)",
        "  shape=(1, 2)",
        "",
    ]
    (shown,) = json.loads(dstrat("show", "fast", "--json").stdout)
    assert shown["arguments"][0] == {
        "name": "level",
        "default": "1",
        "type": "int",
        "help": "How fast: 1 is slow, 2 is fast.",
    }


FIXED = """
class Fast(object):
    def __init__(self, level: int = 1, name="x"):
        pass
"""


def test_options_after_an_alias_are_shown_and_checked(site, dstrat):
    fixed = site.component("a1", "acme.strategy:Fast", options={"level": 1})
    site.add("acme", fixed, site.component("more", "acme.more:Fast"), strategy=FIXED, more=OPTIONS, base=BASE)
    shown = facts(dstrat("show", "a1(name='y', level=3)").stdout.partition("\n\n")[0])
    assert (shown["preset"].strip(), shown["options"].strip()) == ("level=1", "name='y', level=3")
    assert dstrat("show", "a1(nmae=3)").stderr == (
        "dstrat: strategy 'a1(nmae=3)' from acme 1.0: Fast has no argument 'nmae': did you mean 'name'?\n"
    )
    passed_on = facts(dstrat("show", "more(level=2, other=1)").stdout.partition("\n\n")[0])["options"]
    assert passed_on.strip() == "level=2, other=1 (not checked: its class has **kwargs)"


def test_the_guide_is_a_file_of_the_checkout_or_a_page(site, dstrat):
    site.add("acme", site.component("fast"))
    info = "acme-1.0.dist-info"
    assert facts(dstrat("show", "fast").stdout)["guide"].strip() == "https://pypi.org/project/acme/"
    site.write(
        f"{info}/METADATA",
        "Name: acme\nVersion: 1.0\nProject-URL: Home, https://a\nProject-URL: Documentation, https://b\n",
    )
    assert facts(dstrat("show", "fast").stdout)["guide"].strip() == "https://b"
    site.write("check out/README.md", "")
    folder = site.folder / "check out"
    site.write(f"{info}/direct_url.json", json.dumps({"dir_info": {}, "url": folder.as_uri()}))
    assert facts(dstrat("show", "fast").stdout)["guide"].strip() == str(folder / "README.md")


def test_the_collectives_and_strategies_of_hardware_are_shown(site, dstrat):
    facts_of_beads = {"process_group_backend": "hccl", "supports_torch_distributed": False, "device_type": "beads"}
    site.add("acme", site.component("beads", kind="accelerator", strategies={"ddp": "rows"}, **facts_of_beads))
    shown = {name.strip(): text.strip() for name, text in facts(dstrat("show", "beads").stdout).items()}
    assert (shown["device type"], shown["collectives"]) == ("beads", "hccl, not through torch.distributed")
    assert (shown["strategies"], shown["devices"]) == ("rows for ddp", "as its class says")


@pytest.mark.parametrize("target", ["acme.strategy:Missing", "acme.gone:Fast", "gone.deep:Fast", "acme.broken:Fast"])
def test_a_class_whose_source_is_not_there_has_no_docstring(site, dstrat, target):
    site.add("acme", site.component("fast", target), strategy=SOURCE, broken="class Fast(:")
    site.write("deep.py", SOURCE)  # not the module that is meant
    shown = dstrat("show", "fast")
    assert shown.returncode == 0
    assert "docstring" not in shown.stdout


def test_a_name_of_several_kinds_shows_each(site, dstrat):
    site.add("acme", site.component("both"), site.component("both", kind="accelerator"))
    assert [part.split()[0] for part in dstrat("show", "both").stdout.split("\n\n")] == ["strategy", "accelerator"]
    assert dstrat("show", "both", "--kind", "accelerator").stdout.startswith("accelerator  both")


def test_a_group_shows_its_members(site, dstrat):
    site.add("acme", *(site.component(name, kind="accelerator", groups=("beads",)) for name in ("one", "two")))
    assert [part.split()[1] for part in dstrat("show", "beads").stdout.split("\n\n")] == ["one", "two"]


def test_json_holds_all_facts(site, dstrat):
    site.add("acme", site.component("fast", "acme.strategy:Fast"), strategy=SOURCE)
    (shown,) = json.loads(dstrat("show", "fast@acme", "--json").stdout)
    assert (shown["alias"], shown["owner"], shown["docstring"]) == ("fast", "acme", "A fast strategy.")


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("fsat", "strategy 'fsat' is not known: did you mean 'fast'?"),
        ("tpu", "accelerator 'tpu' comes with dstrat-xla, which is not installed: pip install dstrat-xla"),
        ("fast@other", "strategy 'fast' is not offered by 'other': it is offered by acme 1.0"),
        ("old", "strategy 'old' was retired by acme 1.0: use 'fast' instead"),
    ],
)
def test_a_miss_is_one_line_on_stderr_and_exits_with_2(site, dstrat, asked, answer):
    site.add("acme", site.component("fast"), "Tombstone(kind='strategy', alias='old', replacement='fast')")
    shown = dstrat("show", asked)
    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", f"dstrat: {answer}\n")


def test_wrong_usage_exits_with_2(dstrat):
    assert dstrat("show").returncode == 2
    assert dstrat("show", "x", "--kind", "nothing").returncode == 2
    assert dstrat("nothing").returncode == 2


def test_help_exits_with_0_and_names_every_command(dstrat):
    shown = dstrat("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("accelerators", "doctor", "explain", "plugins", "show", "strategies"))
