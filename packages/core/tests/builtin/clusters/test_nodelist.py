"""The first host of SLURM's lists."""

import pytest

from dstrat.builtin.clusters.slurm import first_host
from dstrat.errors import ClusterError


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[01-03,7],gpu5", "n01"),
        ("gpu5,n[01-03,7]", "gpu5"),
        ("n[007]", "n007"),
        ("n[3,1-2]", "n3"),
        ("rack[1-2]node[04-09]", "rack1node04"),
        ("n[1-2]-ib.example.org", "n1-ib.example.org"),
        ("[1-2]n", "1n"),
    ],
)
def test_finds_the_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",", "[", "n[", "n]", "n[]", "n[a-b]", "n[1-2", "n[[1]]", " n1", "n[1]]"])
def test_refuses_what_is_no_list(nodelist):
    with pytest.raises(ClusterError, match="does not begin with a host: set MASTER_ADDR"):
        first_host(nodelist)
