"""Output of programs that a test runs, without what libraries add."""

import re

_GLOO = re.compile(r"\[Gloo\] Rank | is connected to | ?peer ranks\. |Expected number of connected peer ranks is : ")
_NUMBERS = " \n0123456789"


def without_gloo(text: str) -> str:
    """Return the output of a job without gloo's line for each rank and process group.

    torch 2.9 writes it, piece by piece, so that lines of several ranks may be in one another.
    """
    lines = text.splitlines(keepends=True)
    pairs = [(line, _GLOO.sub("", line)) for line in lines]
    return "".join(rest for line, rest in pairs if rest == line or rest.strip(_NUMBERS))
