"""Compare the order of hooks with Lightning's: the same module under both, with every hook recorded.

Runs where Lightning is installed beside dstrat::

    python benchmarks/hook_order.py
    python benchmarks/hook_order.py --only "fit, manual" --traces traces

Differences that are meant are in ``hook_differences.py`` with their reasons; any other one is printed, and the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from hook_differences import DIFFERENCES
from hook_recorder import recorded_frameworks
from hook_scenarios import SCENARIOS


def main() -> int:
    """Run the scenarios under both and print what differs."""
    parser = argparse.ArgumentParser(description="Compare the order of hooks with Lightning's.")
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="run this alone; may be repeated")
    parser.add_argument("--traces", type=Path, help="a folder to write the whole order into")
    options = parser.parse_args()
    quiet()
    different = False
    used: set[str] = set()
    for name in options.only or SCENARIOS:
        ours, theirs = traces(name)
        if options.traces:
            write(options.traces, name, dstrat=ours, lightning=theirs)
        for difference in DIFFERENCES:
            rewritten = difference.rewrite(theirs)
            used |= {difference.reason} if rewritten != theirs else set()
            theirs = rewritten
        unexplained = list(difflib.unified_diff(theirs, ours, "Lightning", "dstrat", lineterm="", n=2))
        different = different or bool(unexplained)
        print(f"{name}: {len(ours)} calls, {'other differences' if unexplained else 'no other difference'}")
        print("".join(f"    {line}\n" for line in unexplained), end="")
    print("\nDifferences that are meant:")
    print("".join(f"  - {reason}\n" for reason in sorted(used)), end="")
    return int(different)


def traces(name: str) -> tuple[list[str], list[str]]:
    """Return what was called in a scenario, by dstrat and by Lightning."""
    found = []
    for framework in recorded_frameworks():
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    SCENARIOS[name](framework, Path(folder))
            except Exception as error:  # noqa: BLE001 - the other scenarios are compared all the same
                framework.calls.append(f"{type(error).__name__}: {error}")
        found.append(list(framework.calls))
    return found[0], found[1]


def write(folder: Path, name: str, **calls: list[str]) -> None:
    """Write what was called, one call in a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for framework, lines in calls.items():
        (folder / f"{name.replace(', ', '-').replace(' ', '_')}.{framework}.txt").write_text("\n".join(lines) + "\n")


def quiet() -> None:
    """Let nothing but the comparison be printed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.filterwarnings("ignore")
    import lightning.pytorch  # noqa: F401 - sets its loggers up

    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "dstrat"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main())
