"""A fit that goes on from what somebody's own DeepSpeed script has saved, converted to our format."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from deepspeed_fit import Model, fit, loader
from deepspeed_loop import parts
from test_native_checkpoints import convert_to_universal

from dstrat.cli.checkpoint.convert import convert
from dstrat.errors import CheckpointError
from dstrat_deepspeed import DeepSpeedStrategy

STAGE = 3


class Scheduled(Model):
    """A module whose learning rate falls with each step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def script(cluster, folder):
    """Train as somebody does without dstrat, in the process group that is open; return the losses behind the save."""
    import deepspeed

    model = Scheduled()
    model.forward = lambda batch: model.training_step(batch, 0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": STAGE},
    }
    configured = model.configure_optimizers()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=configured["optimizer"],
        lr_scheduler=configured["lr_scheduler"]["scheduler"],
        config=config,
        dist_init_required=False,
    )
    losses = []
    for epoch in (0, 1):
        for batch in loader():
            loss = engine(tuple(tensor[cluster.global_rank :: cluster.world_size] for tensor in batch))
            engine.backward(loss)
            engine.step()
            torch.distributed.all_reduce(loss := loss.detach().clone())
            losses.append(float(loss) / cluster.world_size)
        if epoch == 0:
            engine.save_checkpoint(f"{folder}/native")
    engine.destroy()
    if cluster.global_rank == 0:
        convert_to_universal(Path(folder, "native", "global_step4"), Path(folder, "universal"))
    return losses[len(losses) // 2 :]


def in_group(cluster, folder):
    strategy = DeepSpeedStrategy()
    strategy.receive(parts(cluster))
    strategy.connect(Scheduled())
    strategy.setup_environment()
    try:
        return script(cluster, folder)
    finally:
        strategy.teardown()


class Unscheduled(Scheduled):
    def configure_optimizers(self):
        return super().configure_optimizers()["optimizer"]


def go_on(cluster, folder):
    """Go on from each checkpoint; return losses and what is said."""

    def from_checkpoint(path, kind=Scheduled):
        try:
            return fit(kind(), DeepSpeedStrategy(stage=2), cluster, ckpt_path=f"{folder}/{path}")
        except CheckpointError as error:
            return str(error)

    found = {name: from_checkpoint(name) for name in KINDS}
    found["other"] = from_checkpoint("of native", Unscheduled)
    return found | {f"{name} as it is": from_checkpoint(name) for name in ("native", "universal")}


KINDS = ("of native", "of universal")


def test_a_fit_goes_on_where_the_script_was(ranks, tmp_path):
    expected = ranks(in_group, folder=str(tmp_path))[0]
    for name in KINDS:
        result = CliRunner().invoke(convert, [str(tmp_path / name.removeprefix("of ")), str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert "step 4, 1 optimizer, 1 scheduler" in result.output
    for found in ranks(go_on, 4, folder=str(tmp_path)):
        for name in KINDS:
            assert found[name] == pytest.approx(expected, rel=1e-6, abs=0), name
        assert "has 1 schedulers, and this training has 0" in found["other"]
        for name in ("native", "universal"):
            said = found[f"{name} as it is"]
            assert "written by another program, as checkpoint io 'deepspeed' from dstrat-deepspeed" in said
            assert said.endswith(f"'dstrat checkpoint convert {tmp_path / name} NEW', and resume from NEW")
