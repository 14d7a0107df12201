"""Requirements against installed metadata."""


def installed(site, **versions):
    for name, version in versions.items():
        site.write(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        site.write(f"{name}.py", "raise ValueError('never imported')")


def check(site, *requires, **facts):
    site.add("acme", site.component("acme", requires=requires, **facts))
    return site.ask(
        "offer = get_catalog().find('strategy', 'acme')\n"
        "catalog = get_catalog()\n"
        "[attempt(catalog.missing_requirements, offer), attempt(catalog.check_requirements, offer)]"
    )


def test_what_is_installed_is_not_missing(site):
    installed(site, engine="1.5", local="2.0+cu126", early="3.0rc1")
    held = ("engine>=1.0", "engine", "local==2.0", "early>=2.9", "Engine<2")
    assert check(site, *held) == [[], None]


def test_what_is_not_installed_is_named_with_its_command(site):
    assert check(site, "engine>=1.0") == [
        ["engine>=1.0"],
        (
            "MissingRequirementError: strategy 'acme' from acme 1.0 needs engine>=1.0, which is not installed: "
            'pip install "engine>=1.0"'
        ),
    ]


def test_options_of_pip_are_in_the_command(site):
    _, message = check(site, "engine>=1.0", pip_options=("--index-url=https://acme.test/whl",))
    assert message.endswith('which is not installed: pip install --index-url=https://acme.test/whl "engine>=1.0"')


def test_a_note_follows_the_command(site):
    _, message = check(site, "engine>=1.0", requires_note="releases run on Tuesdays alone")
    assert message.endswith('pip install "engine>=1.0" (releases run on Tuesdays alone)')


def test_another_version_than_required_is_missing(site):
    installed(site, engine="0.9")
    assert check(site, "engine>=1.0", "wheels") == [
        ["engine>=1.0", "wheels"],
        (
            "MissingRequirementError: strategy 'acme' from acme 1.0 needs engine>=1.0, but 0.9 is installed, "
            'and wheels, which is not installed: pip install "engine>=1.0" wheels'
        ),
    ]


def test_what_was_missing_is_looked_for_again(site):
    site.add("acme", site.component("acme", requires=("engine>=1.0",)))
    code = """
from importlib.metadata import MetadataPathFinder
import os
catalog = get_catalog()
offer = catalog.find("strategy", "acme")
before = attempt(catalog.check_requirements, offer)
os.mkdir("engine-1.5.dist-info")
open("engine-1.5.dist-info/METADATA", "w").write("Name: engine\\nVersion: 1.5\\n")
MetadataPathFinder().invalidate_caches()
[before, attempt(catalog.check_requirements, offer)]
"""
    before, after = site.ask(code)
    assert before.startswith("MissingRequirementError")
    assert after is None


def test_markers_are_evaluated(site):
    assert check(site, "engine; python_version < '3'", "wheels ; python_version > '3'") == [
        ["wheels ; python_version > '3'"],
        (
            "MissingRequirementError: strategy 'acme' from acme 1.0 needs wheels ; python_version > '3', "
            "which is not installed: pip install wheels"
        ),
    ]


def test_a_requirement_that_is_none_is_the_plugins_mistake(site):
    missing, checked = check(site, "engine >> 1")
    assert missing == ["engine >> 1"]  # so that listings go on
    assert checked.startswith(
        "InvalidComponentError: strategy 'acme' from acme 1.0 requires 'engine >> 1', which is not a requirement: "
    )


def test_metadata_without_a_version_counts_as_missing(site):
    site.write("engine-1.0.dist-info/METADATA", "Name: engine\n")
    assert check(site, "engine")[0] == ["engine"]
