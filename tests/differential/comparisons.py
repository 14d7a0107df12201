"""Comparisons of a random program: with Lightning, with its own resume, and of strategies with one device."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import torch
from tests.differential.differences import close, differences, first_difference
from tests.differential.divisions import division_differences
from tests.differential.programs import global_batch_program, random_program
from tests.differential.running import DEFAULTS, Program, library_of, train

if TYPE_CHECKING:
    from pathlib import Path


def compare(what: str, seed: int, folder: Path) -> list[str]:
    """Return the differences of a program: from Lightning, of its resume, or of a strategy on two ranks."""
    if what == "lightning":
        spec = random_program(seed)
        return differences(spec, *(train(library, spec, folder / library) for library in ("lightning", "dstrat")))
    if what == "divisions":
        return division_differences(seed, folder)
    return resume_differences(seed, folder) if what == "resumes" else strategy_differences(what, seed, folder)


# Resumes


def resume_differences(seed: int, folder: Path) -> list[str]:
    """Return how a run that resumes after a random batch differs from the run that has saved it."""
    spec = {**random_program(seed), "resume": None, "test_n": 0, "predict_n": 0}
    # The callback saves before the module's hook, whose values a resume does not log again.
    spec["logs"] = [entry for entry in spec["logs"] if entry["where"] != "on_train_batch_end"]
    spec["trainer"]["max_epochs"] = max(2, spec["trainer"]["max_epochs"])
    spec["trainer"]["num_sanity_val_steps"] = 0
    path = folder / "saved.ckpt"
    whole, resumed = Program("dstrat", spec, folder), Program("dstrat", spec, folder)
    whole.prepare("whole", _saver(random.Random(seed).randint(1, 8), path))
    whole.fit()
    if not path.exists():  # the training has ended before
        return []
    resumed.prepare("resumed")
    resumed.fit(random_seed=seed + 1234, ckpt_path=path)
    one, other = whole.record(), resumed.record()
    found = [
        f"{name}: {first_difference(one[name], other[name], 0.0)}"
        for name in ("weights", "epoch", "step", "es", "checkpoints")
        if not close(one[name], other[name], 0.0)
    ]
    for name in ("losses", "val_losses", "lrs", "rows"):  # of the resumed run, the last ones of the whole run
        end = one[name][-len(other[name]) :] if other[name] else []
        if not close(end, other[name], 0.0):
            found.append(f"{name}: {first_difference(end, other[name], 0.0)}")
    return found


def _saver(at: int, path: Path) -> Any:
    class Saver(library_of("dstrat").Callback):  # type: ignore[misc]  # the class is one of two libraries
        saves_checkpoints = True
        batches = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.batches += 1
            if self.batches == at:
                trainer.save_checkpoint(path)

    return Saver()


# Strategies


def strategy_differences(alias: str, seed: int, folder: Path) -> list[str]:
    """Return how two ranks differ from one device with the same global batches."""
    spec = {**DEFAULTS, **global_batch_program(seed)}
    alone = {**spec, "bs": 2 * spec["bs"], "val_bs": 2 * spec["val_bs"]}
    one = _delivered(alone, folder / "one")
    two = _delivered(spec, folder / "two", strategy=_forked(alias), devices=2)
    return [
        f"{name}: {first_difference(one[name], two[name], 2e-4)}"
        for name in one
        if not close(one[name], two[name], 2e-4)
    ]


def _forked(alias: str) -> Any:
    from dstrat.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    if alias.startswith("deepspeed_stage_"):
        return DeepSpeedStrategy(stage=int(alias[-1]), start_method="fork")
    return {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[alias](start_method="fork")


def _delivered(spec: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Train, and return what a callback has written to files at the end, as the ranks end with the fit."""
    from dstrat.plugins.io import PortableCheckpointIO

    folder.mkdir()

    class Deliver(library_of("dstrat").Callback):  # type: ignore[misc]  # the class is one of two libraries
        def __init__(self) -> None:
            self.rates: list[Any] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.rates.append([trainer.current_epoch, trainer.global_step, *rates])

        def on_train_end(self, trainer: Any, module: Any) -> None:
            values = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
            if trainer.is_global_zero:
                (folder / "values.json").write_text(json.dumps({"metrics": values, "rates": self.rates}))
            trainer.save_checkpoint(folder / "end.ckpt", weights_only=True)

    program = Program("dstrat", spec, folder)
    program.prepare("", Deliver(), **options)
    program.fit()
    state = PortableCheckpointIO().load_checkpoint(folder / "end.ckpt")["state_dict"]
    weights = {
        name: value.to(torch.float64).flatten().tolist() for name, value in state.items() if "metric" not in name
    }
    return {**json.loads((folder / "values.json").read_text()), "weights": weights}
