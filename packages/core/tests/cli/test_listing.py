"""``dstrat strategies`` and ``dstrat accelerators``."""

import json


def test_strategies_are_listed_by_owner_each_on_one_line(site, dstrat):
    site.add("b-family", site.component("zig", summary="a long description " * 9, synonyms=("zag",)), version="2.1")
    site.add("a-family", site.component("zulu"), site.component("alpha"), site.component("hpu", kind="accelerator"))
    listing = dstrat("strategies")
    assert (listing.returncode, listing.stderr) == (0, "")
    table, hints = listing.stdout.split("\n\n")
    assert table.split("\n") == [
        "a-family 1.0",
        "  alpha       for tests",
        "  zulu        for tests",
        "b-family 2.1",
        f"  zig, zag    {'a long description ' * 9}".rstrip(),
    ]
    assert hints.startswith("not installed (for example: pip install dstrat-bagua):\n  dstrat-bagua ")
    assert "\n  dstrat-fairscale     ddp_fully_sharded, ddp_sharded\n" in hints
    assert "\x1b" not in listing.stdout


def test_an_alias_of_two_owners_is_listed_with_both(site, dstrat):
    site.add("one", site.component("same"))
    site.add("two", site.component("same"))
    assert "one 1.0\n  same@one  for tests\ntwo 1.0\n  same@two  for tests\n" in dstrat("strategies").stdout


def test_a_missing_requirement_is_told(site, dstrat):
    site.add("acme", site.component("fast", requires=("engine>=2",)))
    site.add("other", site.component("good"))
    assert "  fast     for tests (needs engine>=2)\n" in dstrat("strategies", "--all").stdout
    short = dstrat("strategies").stdout
    assert short.startswith("other 1.0\n  good     for tests\nwhat these need is not installed:\n  fast  engine>=2\n\n")


def test_variants_are_folded(site, dstrat):
    spawn = site.component("zig_spawn", options={"start_method": "spawn"})
    other = site.component("zig_zag", target="acme.strategy:Another")
    site.add("acme", site.component("zig"), spawn, site.component("zig_spawn_fast"), other)
    short = dstrat("strategies").stdout
    assert short.startswith("acme 1.0\n  zig (+2)  for tests\n  zig_zag   for tests\n(+n) counts variants")
    assert "\n  dstrat-deepspeed     deepspeed\n" in short
    listing = dstrat("strategies", "--all").stdout
    assert "\n  zig_spawn       for tests\n" in listing
    assert "deepspeed_stage_3_offload_nvme" in listing


def test_what_is_offered_or_whose_package_is_installed_is_no_hint(site, dstrat):
    site.add("acme", site.component("bagua"))
    site.add("dstrat-xla", plugin="raise ValueError")
    listing = dstrat("strategies").stdout
    assert "dstrat-bagua" not in listing
    assert "dstrat-xla" not in listing


def test_packages_without_strategies_are_hints_too(site, dstrat):
    listing = dstrat("strategies").stdout
    assert "\n  dstrat-lightning     adapter for lightning, pytorch_lightning\n" in listing
    assert "\n  dstrat-ray           cluster environment ray_train; launcher ray\n" in listing
    assert "\n  dstrat-torchao       precision float8, int8-weights, nf4-weights, transformer-engine\n" in listing
    assert "\n  dstrat-transformers  adapter for peft, transformers\n" in listing
    site.add("dstrat-ray", plugin="raise ValueError")
    answer = json.loads(dstrat("strategies", "--json").stdout)
    assert answer["not_installed_others"]["dstrat-transformers"] == {"adapter for": ["peft", "transformers"]}
    assert "dstrat-ray" not in answer["not_installed_others"]
    assert "dstrat-ray" not in dstrat("accelerators").stdout


def test_a_misspelled_command_is_answered_with_the_nearest_one(dstrat):
    for command, nearest in ((["stratgies"], "strategies"), (["checkpoint", "inspct"], "inspect")):
        answer = dstrat(*command)
        assert answer.returncode == 2
        assert answer.stderr.endswith(f"there is no command {command[-1]!r}: did you mean {nearest!r}?\n")
    assert "there is no command 'zzz': choose from accelerators, checkpoint, choose, " in dstrat("zzz").stderr


def test_nothing_installed_is_said(dstrat):
    listing = dstrat("accelerators")
    assert listing.stdout.startswith(
        "no accelerators are installed\n\nnot installed (for example: pip install dstrat-hpu):\n  dstrat-hpu "
    )
    assert listing.returncode == 0


def test_groups_are_shown_with_accelerators(site, dstrat):
    site.add("acme", site.component("abacus", kind="accelerator", groups=("beads",)))
    assert "  abacus, beads  for tests" in dstrat("accelerators").stdout


def test_json_holds_all_facts_whatever_plugins_print(site, dstrat):
    record = site.component("fast", options={"level": 3}, requires=("engine>=2",), starts_processes=True)
    site.add("acme", plugin="print('hello')\n" + site.hook(record))
    listing = dstrat("strategies", "--json")
    answer = json.loads(listing.stdout)
    assert listing.stderr == "hello\n"
    assert answer["not_installed"]["dstrat-bagua"] == ["bagua"]
    (fast,) = answer["strategies"]
    expected = {"alias": "fast", "owner": "acme", "version": "1.0", "options": {"level": 3}, "starts_processes": True}
    assert {name: fast[name] for name in expected} == expected
    assert fast["missing_requirements"] == ["engine>=2"]
    assert fast["target"] == "acme.strategy:Acme"


def test_options_that_json_does_not_know_are_shown_as_python_shows_them(site, dstrat):
    record = site.component("fast").replace("'for tests'", "'for tests', 'options': {'kinds': frozenset()}")
    site.add("acme", site.component("slow"), record)
    (fast, _) = json.loads(dstrat("strategies", "--json").stdout)["strategies"]
    assert fast["options"] == {"kinds": "frozenset()"}


def test_listing_imports_neither_torch_nor_rich(site):
    site.write("torch.py", "raise ValueError('imported')")
    site.add("acme", site.component("fast"), strategy="raise ValueError('imported')")
    code = (
        "import sys\nfrom dstrat.cli.main import commands\n"
        "commands(['strategies'], standalone_mode=False)\ncommands(['show', 'fast'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'rich', 'acme.strategy') if name in sys.modules])"
    )
    assert site.run("-c", code).stdout.endswith("\n[]\n")


def test_the_command_runs_as_a_module_too(site):
    done = site.run("-m", "dstrat", "accelerators")
    assert done.returncode == 0
    assert done.stdout.startswith("no accelerators are installed\n")
