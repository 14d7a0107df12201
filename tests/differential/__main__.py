"""Compare random programs: ``python -m tests.differential lightning 0 2000``.  Prints each difference with its seed.

The first argument is what to compare: ``lightning``, ``lightning_ddp`` on two ranks, ``resumes``, ``divisions``, or an
alias such as ``ddp`` with one device.  After ``divisions`` come the largest differences of each strategy.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tests.differential.comparisons import compare
from tests.differential.divisions import compare_division, missing_library, random_division

if TYPE_CHECKING:
    from tests.differential.divisions import Comparison


def main(what: str, first: str, last: str) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    unequal = 0
    compared: list[Comparison] = []
    for seed in range(int(first), int(last)):
        with tempfile.TemporaryDirectory(prefix="program-") as folder:
            if what == "divisions":
                if missing_library(random_division(seed)["alias"]):
                    continue
                compared.append(compare_division(seed, Path(folder)))
                found = compared[-1].differences and [str(compared[-1].spec), *compared[-1].differences]
            else:
                found = compare(what, seed, Path(folder))
        unequal += bool(found)
        if found:
            print(seed, *found, sep="\n    ", flush=True)
    for line in _table(compared):
        print(line)
    print(f"{len(compared) or int(last) - int(first)} programs, {unequal} of them with differences")
    return unequal > 0


def _table(compared: list[Comparison]) -> list[str]:
    """Return the numbers of programs, and the largest differences, of each strategy and kind of weight."""
    groups: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for comparison in compared:
        spec = comparison.spec
        groups[spec["alias"], spec["precision"], "weighted" if spec["weights"] else "-"].append(comparison)
    return [
        f"{alias:18} {precision:8} {weights:9} {len(group):4} programs {sum(len(c.spec['runs']) > 1 for c in group):4} "
        f"resumed   largest difference {max(c.largest for c in group):.1e}"
        for (alias, precision, weights), group in sorted(groups.items())
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
