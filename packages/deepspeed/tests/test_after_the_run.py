"""What a run leaves: the module on rank 0, nothing that a second run stumbles over, also after a failure."""

import contextlib
import resource
import signal
from pathlib import Path

import pytest
import torch
from deepspeed_fit import Model, fit, loader, trainer_of

from dstrat import Callback
from dstrat.errors import CheckpointError, MisuseError
from dstrat_deepspeed import DeepSpeedStrategy


def described(module):
    return {name: (tuple(parameter.shape), parameter.device.type) for name, parameter in module.named_parameters()}


class Failing(Callback):
    """Raises in the middle of a training, in all ranks."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        raise ValueError("on purpose")


def run_again(cluster):
    """Train a module twice, evaluate it with other stages, then let it fail; return what is left each time."""
    module, found = Model(), {}
    found["losses"] = fit(module, DeepSpeedStrategy(stage=3), cluster)
    found["left"] = described(module)
    found["losses"] += fit(module, DeepSpeedStrategy(stage=3), cluster)
    for stage in (3, 2):
        trainer = trainer_of(DeepSpeedStrategy(stage=stage), cluster)
        found[f"validated with {stage}"] = trainer.validate(module, loader(cluster.world_size))[0]["val_loss"]
    with contextlib.suppress(ValueError):
        fit(module, DeepSpeedStrategy(stage=3), cluster, callbacks=[Failing()])
    found["left by a failure"] = described(module)
    try:
        fit(module, DeepSpeedStrategy(stage=3), cluster)
    except (MisuseError, RuntimeError) as error:  # of rank 0, of others
        found["again"] = str(error)
    found["anew"] = fit(Model(), DeepSpeedStrategy(stage=3), cluster)
    return found


def run_alone():
    module = Model()
    losses = fit(module, "single_device") + fit(module, "single_device")
    return losses, trainer_of("single_device").validate(module, loader())[0]["val_loss"], described(module)


def test_rank_0_has_the_module_after_stage_3_and_the_next_run_goes_on_with_it(ranks):
    losses, validated, shapes = run_alone()
    whole, elsewhere = ({name: (shape, kind) for name, (shape, _) in shapes.items()} for kind in ("cpu", "meta"))
    for rank, found in enumerate(ranks(run_again)):
        assert found["losses"] == pytest.approx(losses, rel=1e-5, abs=0)
        assert found["left"] == (elsewhere if rank else whole)
        assert found["validated with 3"] == pytest.approx(validated, rel=1e-5)
        assert found["validated with 2"] == pytest.approx(validated, rel=1e-5)
        assert found["left by a failure"] == elsewhere
        assert (
            rank or "on the meta device, without values, such as after a run of stage 3 that failed" in found["again"]
        )
        assert found["anew"] == pytest.approx(losses[: len(losses) // 2], rel=1e-5, abs=0)


def test_one_process_keeps_its_module_after_a_failure():
    module = Model()
    with pytest.raises(ValueError, match="on purpose"):
        fit(module, DeepSpeedStrategy(stage=3), callbacks=[Failing()])
    assert {kind for _, kind in described(module).values()} == {"cpu"}
    assert not any(torch.equal(mine, new) for mine, new in zip(module.parameters(), Model().parameters(), strict=True))


# Saving


@contextlib.contextmanager
def no_room():
    """Let each file end after some bytes, as on a disk that is full; less than DeepSpeed's have."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN) if hasattr(signal, "SIGXFSZ") else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class SavesWithoutRoom(Callback):
    """Saves while rank 1, then rank 0 has no room for DeepSpeed's files; then once more."""

    saves_checkpoints = True

    def __init__(self, folder):
        self.folder, self.said = folder, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx > 2:
            return
        strategy, target = trainer.strategy, f"{self.folder}/{batch_idx}"
        real = strategy.checkpoint_io.save_checkpoint

        def save_then_fill_the_disk(*arguments):
            real(*arguments)
            if trainer.global_rank == 1 - batch_idx:
                full.enter_context(no_room())

        with contextlib.ExitStack() as full:
            strategy.checkpoint_io.save_checkpoint = save_then_fill_the_disk
            try:
                trainer.save_checkpoint(target)
                self.said.append("")
            except CheckpointError as error:
                self.said.append(str(error))
            finally:
                strategy.checkpoint_io.save_checkpoint = real


def save_where_there_is_no_room(cluster, folder):
    found = {}
    for stage in (1, 3):
        saves = SavesWithoutRoom(f"{folder}/{stage}")
        losses = fit(Model(), DeepSpeedStrategy(stage=stage, save_native=True), cluster, callbacks=[saves])
        found[stage] = losses, saves.said
    return found


def test_native_files_that_one_rank_cannot_write_are_an_error_on_all_and_training_goes_on(ranks, tmp_path):
    expected = fit(Model(), "single_device")
    for found in ranks(save_where_there_is_no_room, folder=str(tmp_path)):
        for stage, (losses, said) in found.items():
            for number, message in enumerate(said[:2]):
                where = tmp_path / str(stage) / str(number)
                assert f"rank {1 - number} could not write DeepSpeed's files '{where}.deepspeed'" in message
                assert message.endswith(f"; the checkpoint '{where}' itself is complete")
            assert said[2] == ""
            assert losses == pytest.approx(expected, rel=1e-5, abs=0)
    for stage in (1, 3):
        names = sorted(path.name for path in Path(tmp_path, str(stage)).iterdir())
        assert names == ["0", "1", "2", "2.deepspeed", "last"]
