"""The tutorial about adapters, beside the libraries that it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.test_guides import check_commands

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.neighbours, pytest.mark.slow]


def test_the_commands_of_the_tutorial_about_adapters_print_what_it_shows(tmp_path: Path) -> None:
    check_commands("tutorial-adapters.md", tmp_path)
