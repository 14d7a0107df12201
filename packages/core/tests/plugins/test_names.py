"""Comparing names."""

import pytest

from dstrat.plugins.settings import nearest, normalized


@pytest.mark.parametrize("name", ["Acme-DDP", "acme_ddp", "acme.ddp", " ACME--_ddp "])
def test_distributions_are_compared_as_pip_does(name):
    assert normalized(name) == "acme-ddp"


@pytest.mark.parametrize(
    ("asked", "candidates", "expected"),
    [
        ("dpd", ["ddp", "dp", "fsdp"], ("dp", "ddp")),
        ("DDPStrategy", ["ddp", "ddp2", "ddp_spawn"], ("ddp",)),
        ("bf16mixed", ["16-mixed", "bf16-mixed"], ("bf16-mixed",)),
        ("ddp-spawn", ["ddp", "ddp_spawn"], ("ddp_spawn",)),
        ("strategy", ["ddp"], ()),
        ("", ["ddp"], ()),
        ("zzz", ["ddp"], ()),
        ("ddp", [], ()),
    ],
)
def test_the_nearest_names_are_found(asked, candidates, expected):
    assert nearest(asked, candidates) == expected


def test_there_are_at_most_so_many():
    assert nearest("ddp9", [f"ddp{n}" for n in range(9)], count=2) == ("ddp0", "ddp1")
