"""Looking components up: what is found, and what is said when nothing or too much is."""


def test_a_component_is_found_by_alias_synonym_and_owner(site):
    site.add("acme-ddp", site.component("ddp", synonyms=("data_parallel",)))
    names = ["ddp", "data_parallel", "ddp@acme-ddp", "data_parallel@Acme_DDP"]
    assert site.ask(f"[find(name) for name in {names}]") == ["ddp@acme-ddp"] * 4


def test_an_offer_knows_its_owner(site):
    site.add("acme-ddp", site.component("ddp"), version="2.1rc1")
    found = site.ask("offer = get_catalog().find('strategy', 'ddp')\n[offer.owner, offer.version, offer.owner_label]")
    assert found == ["acme-ddp", "2.1rc1", "acme-ddp 2.1rc1"]


def test_offers_are_sorted_whatever_the_order_of_the_path(site):
    site.add("b-first", site.component("zeta"), site.component("alpha"))
    site.add("a-second", site.component("beta"), site.component("alpha"))
    assert site.ask("[offer.full_alias for offer in get_catalog().offers('strategy')]") == [
        "alpha@a-second",
        "alpha@b-first",
        "beta@a-second",
        "zeta@b-first",
    ]


# Two owners


def two_owners(site):
    site.add("acme-ddp", site.component("ddp"), site.component("acme_only"))
    site.add("other-ddp", site.component("ddp"), version="0.3")


def test_two_owners_of_one_alias_are_an_error_only_when_it_is_used(site):
    two_owners(site)
    ddp, acme_only = site.ask("find('ddp'), find('acme_only')")
    assert acme_only == "acme_only@acme-ddp"
    assert ddp == (
        "AmbiguousAliasError: strategy 'ddp' is offered by acme-ddp 1.0 and other-ddp 0.3: "
        "write 'ddp@acme-ddp', or set DSTRAT_PREFER=\"ddp=acme-ddp\""
    )


def test_both_ways_out_of_an_ambiguity_work(site):
    two_owners(site)
    assert site.ask("find('ddp@other-ddp')") == "ddp@other-ddp"
    code = "[find('ddp'), [offer.full_alias for offer in get_catalog().offers('strategy')]]"
    assert site.ask(code, DSTRAT_PREFER="x=y, ddp = Other_DDP ") == [
        "ddp@other-ddp",
        ["acme_only@acme-ddp", "ddp@other-ddp"],
    ]


def test_the_order_of_directories_does_not_choose(site):
    two_owners(site)
    site.write("late/first_on_path-1.0.dist-info/METADATA", "Name: aaa\nVersion: 1\n")
    site.write("late/first_on_path-1.0.dist-info/entry_points.txt", "[dstrat.v1]\na = acme_ddp.plugin\n")
    asked = "sys.path.insert({}, 'late')\nstr(find('ddp'))"
    assert site.ask(asked.format(0)) == site.ask(asked.format(9))


def test_a_preference_for_an_owner_that_does_not_offer_it_is_an_error(site):
    two_owners(site)
    ddp, acme_only = site.ask("find('ddp'), find('acme_only')", DSTRAT_PREFER="ddp=third-ddp,acme_only=other-ddp")
    assert ddp == (
        "AmbiguousAliasError: DSTRAT_PREFER wants strategy 'ddp' from third-ddp, which does not offer it: "
        "it is offered by acme-ddp 1.0 and other-ddp 0.3"
    )
    assert acme_only.startswith("AmbiguousAliasError: DSTRAT_PREFER wants strategy 'acme_only' from other-ddp")


def test_an_owner_that_does_not_offer_the_alias_is_an_error(site):
    two_owners(site)
    assert site.ask("find('acme_only@other-ddp')") == (
        "AmbiguousAliasError: strategy 'acme_only' is not offered by 'other-ddp': it is offered by acme-ddp 1.0"
    )


def test_settings_that_cannot_be_understood_are_errors(site):
    assert site.ask("str(attempt(get_catalog))", DSTRAT_PREFER="ddp") == (
        "RequestError: 'ddp' in DSTRAT_PREFER is not understood: write alias=distribution, "
        'for example DSTRAT_PREFER="my_strategy=acme-strategies,other=dstrat-other"'
    )
    assert site.ask("str(attempt(get_catalog))", DSTRAT_PREFER="ddp=a,ddp=b") == (
        "RequestError: DSTRAT_PREFER names two distributions for 'ddp': a and b"
    )
    assert site.ask("str(attempt(get_catalog))", DSTRAT_STRICT_PLUGINS="maybe") == (
        "RequestError: DSTRAT_STRICT_PLUGINS='maybe' is not understood: set it to 1 or 0"
    )


# Strict mode


def test_strict_mode_makes_a_broken_plugin_an_error(site):
    site.add("good", site.component("fine"))
    site.add("bad", plugin="raise ValueError('no')")
    code = "[find('fine'), attempt(get_catalog().offers, 'strategy'), states()['bad:bad']]"
    message = (
        "PluginError: DSTRAT_STRICT_PLUGINS is on, and these plugins do not work: bad 1.0 (ValueError: no). "
        "Repair or uninstall them, or name them in DSTRAT_DISABLE_PLUGINS"
    )
    assert site.ask(code, DSTRAT_STRICT_PLUGINS="1") == [message, message, "failed"]
    assert site.ask("find('fine')", DSTRAT_STRICT_PLUGINS="1", DSTRAT_DISABLE_PLUGINS="bad") == "fine@good"


# Misses


def test_a_typo_is_answered_with_the_nearest_names(site):
    site.add("acme", site.component("zero_fast"), site.component("zero_last"), site.component("zero_slow"))
    assert site.ask("find('zero_ast')") == (
        "UnknownAliasError: strategy 'zero_ast' is not known: did you mean 'zero_fast' or 'zero_last'?"
    )
    assert site.ask("find('ZeroFastStrategy')") == (
        "UnknownAliasError: strategy 'ZeroFastStrategy' is not known: did you mean 'zero_fast'?"
    )


def test_a_typo_of_what_is_not_installed_brings_the_command(site):
    assert site.ask("find('deepsped')") == (
        "UnknownAliasError: strategy 'deepsped' is not known: did you mean 'deepspeed' (pip install dstrat-deepspeed)?"
    )


def test_a_name_like_no_other_is_answered_with_what_there_is(site):
    site.add("acme", *(site.component(f"number{n:02}") for n in range(14)))
    assert site.ask("find('qqq')") == (
        "UnknownAliasError: strategy 'qqq' is not known: available are "
        + ", ".join(f"number{n:02}" for n in range(12))
        + " and 2 more"
    )


def test_variants_of_one_class_do_not_hide_the_others(site):
    variants = [site.component(f"aaa_{n:02}", "acme.a:A", options={"n": n, "m": n}) for n in range(14)]
    others = [site.component(name, f"acme.{name}:B") for name in ("middle", "zebra")]
    site.add("acme", site.component("aaa", "acme.a:A", options={"n": 1}), *variants, *others)
    shown = ", ".join(["aaa", *(f"aaa_{n:02}" for n in range(9)), "middle", "zebra"])
    assert (
        site.ask("find('qqq')") == f"UnknownAliasError: strategy 'qqq' is not known: available are {shown} and 5 more"
    )


def test_a_default_of_the_core_stays_whoever_else_offers_its_name(site):
    site.add("core_like", site.component("plain", kind="precision"))
    site.write("core_like-1.0.dist-info/METADATA", "Name: dstrat\nVersion: 1.0\n")
    site.add("acme", site.component("plain", kind="precision"))
    code = "attempt(get_catalog().find_default, 'precision', 'plain')"
    assert site.ask(code) == "plain@dstrat"
    assert site.ask(code, DSTRAT_PREFER="plain=acme") == "plain@acme"
    assert site.ask("find('plain', 'precision')").startswith("AmbiguousAliasError: precision 'plain' is offered by ")


def test_a_name_of_another_kind_is_recognised(site):
    site.add("acme", site.component("abacus", kind="accelerator"))
    assert site.ask("find('abacus')") == "UnknownAliasError: strategy 'abacus' is not known: 'abacus' is an accelerator"


def test_a_group_counts_as_a_name(site):
    site.add("acme", site.component("abacus", kind="accelerator", groups=("beads",)))
    assert site.ask("find('bead', 'accelerator')").endswith("did you mean 'beads'?")


def test_a_known_package_that_is_not_installed_is_named_with_its_command(site):
    assert site.ask("find('fsdp'), find('ddp_sharded'), find('tpu', 'accelerator')") == [
        "NotInstalledError: strategy 'fsdp' comes with dstrat-fsdp, which is not installed: pip install dstrat-fsdp",
        (
            "NotInstalledError: strategy 'ddp_sharded' comes with dstrat-fairscale, which is not installed: "
            "pip install dstrat-fairscale"
        ),
        "NotInstalledError: accelerator 'tpu' comes with dstrat-xla, which is not installed: pip install dstrat-xla",
    ]


def test_a_known_package_that_is_installed_says_why_it_does_not_offer_the_alias(site):
    site.add("dstrat-fsdp", site.component("fsdp"), version="0.0.1")
    site.add("dstrat-hpu", plugin="raise ValueError('no driver')")
    assert site.ask("find('fsdp_hybrid_shard'), find('hpu_single')", DSTRAT_DISABLE_PLUGINS="dstrat-xla") == [
        (
            "NotInstalledError: strategy 'fsdp_hybrid_shard' comes with dstrat-fsdp, and the installed dstrat-fsdp "
            "0.0.1 does not have it: pip install --upgrade dstrat-fsdp (plugins that do not work: dstrat-hpu 1.0, "
            "ValueError: no driver)"
        ),
        (
            "NotInstalledError: strategy 'hpu_single' comes with dstrat-hpu 1.0, which could not be loaded "
            "(ValueError: no driver)"
        ),
    ]
    assert site.ask("find('fsdp')", DSTRAT_DISABLE_PLUGINS="dstrat-fsdp").startswith(
        "NotInstalledError: strategy 'fsdp' comes with dstrat-fsdp 0.0.1, which is disabled "
        "(named by DSTRAT_DISABLE_PLUGINS)"
    )


def test_a_miss_names_the_plugins_that_failed(site):
    site.add("bad", plugin="raise ValueError('no')")
    site.add("future", group="dstrat.v9")
    assert site.ask("find('qqq')") == (
        "UnknownAliasError: strategy 'qqq' is not known: available are none (plugins that do not work: "
        "bad 1.0, ValueError: no; future 1.0, it is written for dstrat.v9, and this dstrat has dstrat.v1: "
        "upgrade the older one)"
    )


def test_a_retired_alias_says_what_replaces_it(site):
    site.add(
        "acme",
        site.component("new"),
        "Tombstone(kind='strategy', alias='old', replacement='new', reason='one name is enough')",
        "Tombstone(kind='strategy', alias='gone')",
    )
    assert site.ask("find('old'), find('gone')") == [
        "RetiredAliasError: strategy 'old' was retired by acme 1.0 (one name is enough): use 'new' instead",
        "RetiredAliasError: strategy 'gone' was retired by acme 1.0: nothing replaces it",
    ]


def test_an_alias_that_one_retired_and_another_offers_is_found(site):
    site.add("acme", "Tombstone(kind='strategy', alias='old')")
    site.add("heir", site.component("old"))
    assert site.ask("find('old')") == "old@heir"


# Refresh


def test_refresh_sees_what_was_installed_and_uninstalled_within_one_tick_of_the_clock(site):
    site.add("first", site.component("one"))
    site.add("second", site.component("two"))
    (site.folder / "second-1.0.dist-info").rename(site.folder / "hidden")
    code = """
import os
sys.path.remove("")
os.utime(".", (1e9, 1e9))
before = find("two")
os.rename("hidden", "second-1.0.dist-info")
os.rename("first-1.0.dist-info", "away")
os.utime(".", (1e9, 1e9))
refresh_catalog()
[before, find("two"), find("one")]
"""
    before, two, one = site.ask(code)
    assert before.startswith("UnknownAliasError")
    assert two == "two@second"
    assert one.startswith("UnknownAliasError")


def test_refresh_retries_a_plugin_that_failed(site):
    site.add("acme", plugin="raise ValueError")
    site.write("repaired.py", site.hook(site.component("fine")))
    code = "get_catalog()\nimport os; os.replace('repaired.py', 'acme/plugin.py')\nrefresh_catalog()\nfind('fine')"
    assert site.ask(code) == "fine@acme"


def test_the_catalog_is_built_once_by_many_threads(site):
    site.add("acme", plugin="import sys\nprint('loaded', file=sys.stderr)\n" + site.hook(site.component("fine")))
    done = site.run(
        "-c",
        "from threading import Thread\nfrom dstrat.plugins.catalog import get_catalog\nseen = []\n"
        "threads = [Thread(target=lambda: seen.append(get_catalog())) for _ in range(20)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\nprint(len(seen), len(set(map(id, seen))))",
    )
    assert (done.stdout, done.stderr) == ("20 1\n", "loaded\n")
