"""Compare random programs: ``python -m tests.differential lightning 0 2000``.  Prints each difference with its seed.

The first argument is what to compare: ``lightning``, ``lightning_ddp`` on two ranks, ``resumes``, ``divisions``, or an
alias such as ``ddp`` with one device.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from tests.differential.comparisons import compare


def main(what: str, first: str, last: str) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    unequal = 0
    for seed in range(int(first), int(last)):
        with tempfile.TemporaryDirectory(prefix="program-") as folder:
            found = compare(what, seed, Path(folder))
        unequal += bool(found)
        if found:
            print(seed, *found, sep="\n    ", flush=True)
    print(f"{int(last) - int(first)} programs, {unequal} of them with differences")
    return unequal > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
