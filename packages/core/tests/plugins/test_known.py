"""The table of install hints."""

import json
import os

import pytest

from dstrat.plugins.component import KINDS, check_alias
from dstrat.plugins.known import KNOWN, KNOWN_CLASSES, known_distribution, pip_command


@pytest.mark.parametrize("kind", KNOWN)
def test_the_table_is_sorted_and_its_entries_are_well_formed(kind):
    assert kind in KINDS
    assert list(KNOWN[kind]) == sorted(KNOWN[kind])
    for alias, requirement in KNOWN[kind].items():
        check_alias(alias)
        assert known_distribution(requirement).startswith("dstrat-")


@pytest.mark.parametrize(
    ("alias", "requirement"),
    [
        ("ddp_fork_find_unused_parameters_false", "dstrat-ddp"),
        ("dp", "dstrat-ddp"),
        ("ddp_sharded_spawn", "dstrat-fairscale"),
        ("fsdp_native_full_shard_offload", "dstrat-fsdp"),
        ("deepspeed_stage_3_offload_nvme", "dstrat-deepspeed"),
        ("tpu_spawn", "dstrat-xla"),
        ("xla_debug", "dstrat-xla"),
        ("hpu_parallel", "dstrat-hpu"),
        ("ipu_strategy", "dstrat-ipu"),
        ("bagua", "dstrat-bagua"),
        ("colossalai", "dstrat-colossalai"),
        ("hivemind", "dstrat-hivemind"),
        ("horovod", "dstrat-horovod"),
    ],
)
def test_the_aliases_of_every_family_are_known(alias, requirement):
    assert KNOWN["strategy"][alias] == requirement


def test_commands_are_quoted_for_a_shell():
    assert pip_command("d") == "pip install d"
    assert pip_command("a[b]", "c>=1", "d", upgrade=True) == 'pip install --upgrade "a[b]" "c>=1" d'


@pytest.fixture
def origin(site):
    """Install dstrat's metadata with a ``direct_url.json``, as pip writes it for the way in which it was asked."""

    def install(**recorded):
        site.write("dstrat-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: dstrat\nVersion: 0.1.0\n")
        site.write("dstrat-0.1.0.dist-info/direct_url.json", json.dumps(recorded))

    return install


@pytest.mark.parametrize("dir_info", [{}, {"editable": True}], ids=["copied", "editable"])
def test_from_a_checkout_hints_are_its_folders(site, origin, tmp_path_factory, dir_info):
    checkout = tmp_path_factory.mktemp("check") / "a clone"
    origin(url=(checkout / "packages" / "core").as_uri(), dir_info=dir_info)
    for name in ("core", "fsdp"):
        (checkout / "packages" / name).mkdir(parents=True)
        (checkout / "packages" / name / "pyproject.toml").touch()
    fsdp, ddp = site.ask("find('fsdp'), find('ddp')")
    folder = checkout / "packages" / "fsdp"
    assert fsdp == (
        f"NotInstalledError: strategy 'fsdp' comes with dstrat-fsdp, which is not installed: pip install \"{folder}\""
    )
    assert ddp.endswith(": pip install dstrat-ddp")  # its folder is not there


def test_below_the_working_directory_the_folder_is_relative(site, origin):
    origin(url=(site.folder / "packages" / "core").as_uri(), dir_info={})
    site.write("packages/fsdp/pyproject.toml", "")
    assert ask_for_command(site, "dstrat-fsdp") == "pip install ./packages/fsdp"
    assert ask_for_command(site, "dstrat-fsdp[a]>=1,<2", upgrade=True) == 'pip install --upgrade "./packages/fsdp[a]"'
    assert ask_for_command(site, "dstrat[new]", "dstrat-fsdp-2") == 'pip install "dstrat[new]" dstrat-fsdp-2'
    site.write("packages/bagua/pyproject.toml", "")
    heading = "\nnot installed (for example: pip install ./packages/bagua):\n  dstrat-bagua         bagua\n"
    assert heading in site.run("-m", "dstrat", "strategies").stdout


def test_from_a_wheel_hints_are_the_newest_wheels_beside_it(site, origin):
    origin(url=(site.folder / "dist" / "dstrat-0.1.0-py3-none-any.whl").as_uri(), archive_info={})
    assert ask_for_command(site, "dstrat-fsdp") == "pip install dstrat-fsdp"
    for age, version in enumerate(["0.10.0", "0.9.0"]):
        site.write(f"dist/dstrat_fsdp-{version}-py3-none-any.whl", "")
        os.utime(site.folder / f"dist/dstrat_fsdp-{version}-py3-none-any.whl", (1e9, 1e9 - age))
    assert ask_for_command(site, "dstrat-fsdp") == "pip install ./dist/dstrat_fsdp-0.10.0-py3-none-any.whl"


def test_from_a_repository_hints_are_its_folders_at_the_same_revision(site, origin):
    repository = {"url": "https://example.org/dstrat.git", "subdirectory": "packages/core"}
    origin(**repository, vcs_info={"vcs": "git", "requested_revision": "main", "commit_id": "0" * 40})
    start = 'pip install "git+https://example.org/dstrat.git'
    assert ask_for_command(site, "dstrat-fsdp") == f'{start}@main#subdirectory=packages/fsdp"'
    origin(**repository, vcs_info={"vcs": "git", "commit_id": "0" * 40})
    assert ask_for_command(site, "dstrat-fsdp") == f'{start}#subdirectory=packages/fsdp"'
    assert ask_for_command(site, "dstrat-hpu[ddp]") == (
        'pip install "dstrat-hpu[ddp] @ git+https://example.org/dstrat.git#subdirectory=packages/hpu"'
    )
    origin(url="https://example.org/dstrat.zip", subdirectory="dstrat/packages/core", archive_info={})
    assert ask_for_command(site, "dstrat-fsdp") == (
        'pip install "https://example.org/dstrat.zip#subdirectory=dstrat/packages/fsdp"'
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"url": "https://example.org/dstrat-0.1.0.whl", "archive_info": {}}'])
def test_of_other_origins_hints_are_names(site, origin, text):
    origin()
    site.write("dstrat-0.1.0.dist-info/direct_url.json", text)
    assert ask_for_command(site, "dstrat-fsdp") == "pip install dstrat-fsdp"


def ask_for_command(site, *requirements, **options):
    code = f"from dstrat.plugins.known import pip_command\ncommand = pip_command(*{requirements!r}, **{options!r})"
    command, imported_torch = site.ask(f"{code}\n(command, 'torch' in sys.modules)")
    assert not imported_torch
    return command


@pytest.mark.parametrize("kind", KNOWN_CLASSES)
def test_the_table_of_classes_is_sorted_and_names_distributions_that_offer_the_kind(kind):
    assert list(KNOWN_CLASSES[kind]) == sorted(KNOWN_CLASSES[kind])
    assert {*KNOWN_CLASSES[kind].values()} == {*KNOWN[kind].values()}
