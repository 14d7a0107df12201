"""A script as a user's: it trains through the Trainer with an alias, in processes that start as the alias says."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.testing.advice import fail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.testing.subject import Subject

_JOB = "job.pickle"


def run_program(
    subject: Subject, folder: Path, *, devices: int, accelerator: str, seconds: float, environ: Mapping[str, str]
) -> list[str]:
    """Run the script; return the processes that trained. Fail the test where the script fails.

    Args:
        subject: The strategy.
        folder: Where the script finds its job and leaves what came of it.
        devices: Number of ranks.
        accelerator: Where.
        seconds: How long it may take.
        environ: Its environment variables, beside those of this process.
    """
    __tracebackhide__ = True
    (folder / _JOB).write_bytes(pickle.dumps((subject, devices, accelerator)))
    command = [sys.executable, "-m", "dstrat.testing.program", str(folder)]
    environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace")
        fail(f"a script that trains with {subject.component.alias!r} was not done in {seconds:.0f} s", details=printed)
    if done.returncode != 0:
        fail(
            f"a script that trains with {subject.component.alias!r} exited with code {done.returncode}",
            details=(done.stderr or done.stdout)[-3000:],
        )
    return sorted(path.name for path in folder.glob("trained-*"))


def main() -> None:
    """Train, and leave a file for each rank that did."""
    import torch

    from dstrat.testing.fits import Fit
    from dstrat.testing.launching import LeavesTrace
    from dstrat.testing.modules import Net
    from dstrat.training.trainer import Trainer

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    subject, devices, accelerator = pickle.loads((folder / _JOB).read_bytes())  # noqa: S301 - the test wrote it
    subject.cls  # noqa: B018 - registers what no distribution offers
    trainer = Trainer(
        strategy=subject.make() if subject.options else subject.component.alias,
        accelerator=accelerator,
        devices=devices * subject.devices_per_process,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=LeavesTrace(folder),
        default_root_dir=folder,
    )
    work = Fit(samples=16, accelerator=accelerator)
    trainer.fit(Net(work, subject.configure_model))


if __name__ == "__main__":
    main()
