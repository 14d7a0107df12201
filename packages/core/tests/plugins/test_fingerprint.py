"""The fingerprint: equal where resolution is equal, different where it is not."""

CODE = "[get_catalog().fingerprint, list(get_catalog().fingerprint_lines)]"


def with_objects(alias):
    return f"Component(kind='strategy', alias='{alias}', target='acme.strategy:Acme', summary='', options=%s)" % (
        "{'io': object(), 'kinds': {'b', 'a'}}"
    )


def fill(site):
    site.add("acme", site.component("one", requires=("x",), options={"b": 1, "a": {"deep": (1, 2)}}))
    site.add("other", site.component("two"), "Tombstone(kind='strategy', alias='old', replacement='two')")


def test_it_is_the_same_for_all_hash_seeds_and_orders_of_the_path(site):
    fill(site)
    site.write("late/third-1.0.dist-info/METADATA", "Name: third\nVersion: 1\n")
    site.write("late/third-1.0.dist-info/entry_points.txt", "[dstrat.v1]\na = third\n")
    site.write("late/third.py", site.hook(with_objects("three")))
    asked = "sys.path.insert({}, 'late')\n" + CODE
    answers = [site.ask(asked.format(place), PYTHONHASHSEED=seed) for place in (0, 9) for seed in ("0", "1", "77")]
    assert all(answer == answers[0] for answer in answers)


def test_it_says_what_there_is(site):
    fill(site)
    assert site.ask(CODE, DSTRAT_PREFER="one=acme") == [
        site.ask(CODE, DSTRAT_PREFER=" one = Acme,")[0],
        [
            "DSTRAT_PREFER one=acme",
            "retired strategy old in favour of two, by other 1.0",
            (
                'strategy one from acme 1.0: acme.strategy:Acme {"options": {"a": {"deep": [1, 2]}, "b": 1}, '
                '"requires": ["x"]}'
            ),
            "strategy two from other 1.0: acme.strategy:Acme {}",
        ],
    ]


def test_it_changes_with_whatever_changes_resolution_and_with_nothing_else(site):
    fill(site)
    original = site.ask(CODE)[0]
    assert site.ask(CODE, DSTRAT_DISABLE_PLUGINS="other")[0] != original
    assert site.ask(CODE, DSTRAT_PREFER="two=other")[0] != original
    site.add("bad", plugin="raise ValueError")
    site.write("unrelated-1.0.dist-info/METADATA", "Name: unrelated\nVersion: 1\n")
    assert site.ask(CODE)[0] == original
    site.add("acme", site.component("one", requires=("x",), options={"b": 2, "a": {"deep": (1, 2)}}))
    assert site.ask(CODE)[0] != original


def test_objects_in_options_do_not_bring_their_addresses(site):
    site.add("acme", with_objects("one"))
    lines = [site.ask(CODE, PYTHONHASHSEED=seed)[1] for seed in ("1", "2")]
    assert lines[0] == lines[1]
    assert lines[0] == [
        (
            "strategy one from acme 1.0: acme.strategy:Acme "
            '{"options": {"io": "<builtins.object>", "kinds": ["\\"a\\"", "\\"b\\""]}}'
        )
    ]
