"""Fixture that starts replica groups."""

import pytest
from packages.torchft.tests.groups import PROGRAM, Group


@pytest.fixture
def start(tmp_path):
    """Start a group; all that are left are killed after the test."""
    groups = []

    def start_one(number, of, address, *arguments, program=PROGRAM, name=None):
        variables = {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(of), "TORCHFT_LIGHTHOUSE": address}
        groups.append(Group(tmp_path, program, *arguments, name=name or f"group-{number}", **variables))
        return groups[-1]

    yield start_one
    for group in groups:
        group.kill()
