"""Comparisons of a random program: with Lightning, with its own resume, and of strategies with one device."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import torch
from tests.differential.differences import close, differences, first_difference
from tests.differential.divisions import compare_division
from tests.differential.programs import Draw, global_batch_program, monitor_rare_validations, random_program
from tests.differential.running import DEFAULTS, Program, library_of, train

from dstrat.errors import DstratError

if TYPE_CHECKING:
    from pathlib import Path


def compare(what: str, seed: int, folder: Path) -> list[str]:
    """Return the differences of a program: from Lightning, of its resume, or of a strategy on two ranks."""
    if what == "lightning":
        spec = random_program(seed)
        return differences(spec, *(train(library, spec, folder / library) for library in ("lightning", "dstrat")))
    if what == "divisions":
        comparison = compare_division(seed, folder)
        return [str(comparison.spec), *comparison.differences] if comparison.differences else []
    if what == "lightning_ddp":
        # With another seed, or without shuffle, Lightning has another order.
        spec = {**global_batch_program(seed), "shuffle": True, "seed_everything": True}
        theirs = _delivered("lightning", spec, folder / "lightning", strategy=_forked(what), devices=2)
        ours = _delivered("dstrat", spec, folder / "dstrat", strategy=_forked("ddp"), devices=2)
        return _delivered_differences(theirs, ours)
    return resume_differences(seed, folder) if what == "resumes" else strategy_differences(what, seed, folder)


# Resumes


def resume_differences(seed: int, folder: Path) -> list[str]:
    """Return how a run that resumes after a random batch differs from the run that has saved it."""
    draw = random.Random(seed)
    spec = {**random_program(seed), "resume": None, "stop": None, "test_n": 0, "predict_n": 0}
    options = spec["trainer"]
    options.pop("fast_dev_run", None)
    options.pop("detect_anomaly", None)  # which may end the run
    options["max_epochs"] = max(2, options["max_epochs"])
    options["num_sanity_val_steps"] = 0  # which a resumed fit leaves out, as values of on_train_start
    spec["logs"] = [entry for entry in spec["logs"] if entry["where"] != "on_train_start"]
    if draw.random() < 0.25 and not spec["manual"] and spec["optimizer"] != "lbfgs" and not spec.get("ema"):
        spec["swa"] = {"swa_lrs": 0.01, "swa_epoch_start": draw.choice([1, 2, 0.5]), "annealing_epochs": 2}
    monitor_rare_validations(spec, Draw(seed))
    path = folder / "saved.ckpt"
    # Both have their checkpoints in one folder, which is at first as it was when the checkpoint was saved.
    checkpoints, snapshot = folder / "checkpoints", folder / "snapshot"
    whole, resumed = Program("dstrat", spec, checkpoints), Program("dstrat", spec, checkpoints)
    whole.prepare("saved", _saver(draw.randint(1, 8), path, checkpoints, snapshot))
    try:
        whole.fit()
    except DstratError:  # the comparison with Lightning shows whether it should train
        return []
    if not path.exists():  # the training has ended before
        return []
    one = whole.record()
    shutil.rmtree(checkpoints)
    shutil.copytree(snapshot, checkpoints, symlinks=True)
    resumed.prepare("saved")
    resumed.fit(random_seed=seed + 1234, ckpt_path=path)
    other = resumed.record()
    one["rows"], other["rows"] = one["rows"][0], other["rows"][0]
    for name in ("losses", "val_losses", "lrs", "outputs", "metrics", "rng", "rows"):
        # The resumed run has the last ones of the whole run.
        one[name] = one[name][-len(other[name]) :] if other[name] else []
    return [
        f"{name}: {first_difference(one[name], other[name], 0.0)}"
        for name in one
        if (name != "grads" or other["losses"]) and name != "events" and not close(one[name], other[name], 0.0)
    ]


def _saver(at: int, path: Path, checkpoints: Path, snapshot: Path) -> Any:
    class Saver(library_of("dstrat").Callback):  # type: ignore[misc]  # the class is one of two libraries
        saves_checkpoints = runs_last = True
        batches = 0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.batches += 1
            if self.batches == at:
                trainer.save_checkpoint(path)
                checkpoints.mkdir(exist_ok=True)
                shutil.copytree(checkpoints, snapshot, symlinks=True)

    return Saver()


# Strategies


def strategy_differences(alias: str, seed: int, folder: Path) -> list[str]:
    """Return how two ranks differ from one device with the same global batches."""
    spec = {**DEFAULTS, **global_batch_program(seed)}
    alone = {**spec, "bs": 2 * spec["bs"], "val_bs": 2 * spec["val_bs"]}
    one = _delivered("dstrat", alone, folder / "one")
    two = _delivered("dstrat", spec, folder / "two", strategy=_forked(alias), devices=2)
    return _delivered_differences(one, two)


def _delivered_differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {first_difference(one[name], other[name], 2e-4)}"
        for name in one
        if not close(one[name], other[name], 2e-4)
    ]


def _forked(alias: str) -> Any:
    if alias == "lightning_ddp":
        from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

        return LightningDDPStrategy(start_method="fork")
    from dstrat.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    if alias.startswith("deepspeed_stage_"):
        return DeepSpeedStrategy(stage=int(alias[-1]), start_method="fork")
    return {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[alias](start_method="fork")


def _delivered(library: str, spec: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Train, and return what a callback has written to files at the end, as the ranks end with the fit."""
    from dstrat.plugins.io import PortableCheckpointIO

    folder.mkdir()

    class Deliver(library_of(library).Callback):  # type: ignore[misc]  # the class is one of two libraries
        def __init__(self) -> None:
            self.rates: list[Any] = []

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.rates.append([trainer.current_epoch, trainer.global_step, *rates])

        def on_train_end(self, trainer: Any, module: Any) -> None:
            values = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
            if trainer.is_global_zero:
                (folder / "values.json").write_text(json.dumps({"metrics": values, "rates": self.rates}))
            if library == "dstrat":  # a checkpoint has the whole state of those that shard it
                trainer.save_checkpoint(folder / "end.ckpt", weights_only=True)
            elif trainer.is_global_zero:
                torch.save(module.state_dict(), folder / "end.ckpt")

    program = Program(library, spec, folder)
    program.prepare("", Deliver(), **options)
    program.fit(spec["seed"])
    path = folder / "end.ckpt"
    state = PortableCheckpointIO().load_checkpoint(path)["state_dict"] if path.is_dir() else torch.load(path)
    weights = {
        name: value.to(torch.float64).flatten().tolist() for name, value in state.items() if "metric" not in name
    }
    return {**json.loads((folder / "values.json").read_text()), "weights": weights}
