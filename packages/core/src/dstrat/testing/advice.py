"""Failure messages of the conformance kit: observed, expected, fix."""

from __future__ import annotations

import textwrap
from typing import NoReturn

import pytest

_WIDTH = 110


def fail(seen: str, *, expected: str = "", cure: str = "", details: str = "") -> NoReturn:
    """End the test with advice.

    Args:
        seen: What is wrong, one sentence without a full stop.
        expected: What should have been, as a sentence.
        cure: What the author does about it.
        details: Further lines as they are, such as a traceback.
    """
    __tracebackhide__ = True
    paragraphs = [seen, *(f"{name}: {text}" for name, text in (("expected", expected), ("cure", cure)) if text)]
    lines = [textwrap.fill(paragraph, _WIDTH, subsequent_indent="    ") for paragraph in paragraphs]
    pytest.fail("\n".join([*lines, *([textwrap.indent(details.rstrip(), "  | ")] if details else [])]), pytrace=False)
