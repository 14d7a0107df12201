"""Programs of third parties, each trained by Lightning and by dstrat in the same environment.

    python harness.py [NAME ...]      prints a table: the largest difference of the losses of global rank 0

What a program is: a function that returns the module, what ``fit`` takes, and arguments of the Trainer.  Everything is
made anew for each run, with the same seed.  Ranks are forked, so that the libraries are imported once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "agg"
warnings.filterwarnings("ignore")

import torch  # noqa: E402 - after the number of threads

torch.set_num_threads(1)
STEPS = 10


def recorder(library, path):
    """Return a callback of a Lightning library that writes the losses of global rank 0."""

    class Recorder(library.Callback):
        def __init__(self):
            self.losses = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is None:  # manual optimization: the weights say as much
                loss = sum(p.detach().double().abs().sum() for p in pl_module.parameters())
                loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            self.losses.append(float(loss))

        def on_train_end(self, trainer, pl_module):
            if trainer.global_rank == 0:
                values = {name: float(value) for name, value in trainer.callback_metrics.items()}
                Path(path).write_text(json.dumps({"losses": self.losses, "metrics": values}))

    return Recorder()


def run(program, which, path):
    """Train a program by a Trainer, in this process and its children."""
    library = importlib.import_module(getattr(program, "library", "lightning.pytorch"))
    library.seed_everything(7, verbose=False)
    module, data, options = program()
    options = {"max_epochs": 1, "limit_train_batches": STEPS, "limit_val_batches": 2, **options}
    callbacks = [*options.pop("callbacks", []), recorder(library, path)]
    common = {
        "accelerator": "cpu",
        "devices": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "callbacks": callbacks,
        "default_root_dir": str(Path(path).parent),
        **options,
    }
    if which == "lightning ddp":
        unused = library.strategies.DDPStrategy(start_method="fork", find_unused_parameters=True)
        trainer = library.Trainer(strategy=unused, **common)
    else:
        import dstrat
        from dstrat.strategies import DDPStrategy, FSDPStrategy

        if which == "dstrat ddp":
            strategy = DDPStrategy(start_method="fork", find_unused_parameters=True)
        else:
            strategy = FSDPStrategy(start_method="fork")
        trainer = dstrat.Trainer(strategy=strategy, **common)
    trainer.fit(module, **data)


def attempt(program, which, path):
    """Run in a process of its own; return the outcome, or the error."""
    context = multiprocessing.get_context("fork")
    os.chdir(Path(path).parent)
    log = Path(f"{path}.log")

    def target():
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            try:
                run(program, which, path)
            except BaseException:
                traceback.print_exc()
                stream.flush()
                os._exit(1)
        os._exit(0)

    process = context.Process(target=target)
    process.start()
    process.join(150)
    if process.is_alive():
        process.kill()
        return "took more than 150 s"
    if not Path(path).exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing was written"])[-1][:300]
    return json.loads(Path(path).read_text())


def difference(reference, outcome):
    """Return how far losses are apart, relative where they are large."""
    pairs = list(zip(reference["losses"], outcome["losses"], strict=True))
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def main():
    import programs

    wanted = sys.argv[1:] or list(programs.PROGRAMS)
    folder = Path(os.environ.get("PROGRAM_RUNS") or tempfile.mkdtemp(prefix="programs-"))
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    print("logs in", folder, flush=True)
    for name in wanted:
        program = programs.PROGRAMS[name]
        begun = time.time()
        outcomes = {}
        for which in ("lightning ddp", "dstrat ddp", "dstrat fsdp"):
            path = folder / f"{name}-{which.replace(' ', '-')}.json"
            path.unlink(missing_ok=True)
            outcomes[which] = attempt(program, which, path)
        reference = outcomes.pop("lightning ddp")
        if isinstance(reference, str):
            print(f"{name}: Lightning itself fails: {reference}", flush=True)
            failed += 1
            continue
        cells = []
        for which, outcome in outcomes.items():
            if isinstance(outcome, str):
                cells.append(f"{which} FAILED: {outcome}")
                failed += 1
            else:
                gap = difference(reference, outcome)
                failed += not gap <= 1e-6
                cells.append(f"{which} {gap:.1e}")
        first, last = reference["losses"][0], reference["losses"][-1]
        print(f"{name}: {len(reference['losses'])} steps, {first:.4f} to {last:.4f}: {', '.join(cells)} "
              f"({time.time() - begun:.0f} s)", flush=True)  # fmt: skip
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
