"""The table of install hints."""

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
    assert pip_command("dstrat-ddp") == "pip install dstrat-ddp"
    assert pip_command("a[b]", "c>=1", "d", upgrade=True) == 'pip install --upgrade "a[b]" "c>=1" d'


@pytest.mark.parametrize("kind", KNOWN_CLASSES)
def test_the_table_of_classes_is_sorted_and_names_distributions_that_offer_the_kind(kind):
    assert list(KNOWN_CLASSES[kind]) == sorted(KNOWN_CLASSES[kind])
    assert {*KNOWN_CLASSES[kind].values()} == {*KNOWN[kind].values()}
