"""DeepSpeed's own checkpoints: read from real files of every stage, and written for programs without dstrat."""

import pickle
import runpy
import shutil
import sys
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from deepspeed_loop import Net, batches, parts, start, train
from tied_net import Tied, assert_close

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.cli.checkpoint.convert import convert
from dstrat.errors import CheckpointError
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.native_checkpoint import DeepSpeedCheckpointIO

STEPS = 3
FLOAT32, BF16, UNIVERSAL = "float32", "bf16", "universal"


def script(cluster, out, stage, bf16=False, source=None):
    """What somebody's own DeepSpeed script does, with the process group that is open."""
    import deepspeed

    model = Tied()
    if bf16:
        model = model.bfloat16()
    model.forward = lambda batch: model.training_step(batch, 0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=model.configure_optimizers(), config=config, dist_init_required=False
    )
    if source is not None:
        loaded, _ = engine.load_checkpoint(source)
        assert loaded is not None
    losses = []
    for batch in batches(STEPS):
        where = (cluster.global_rank, cluster.world_size)
        own = tuple(t[where[0] :: where[1]].to(torch.bfloat16 if bf16 else torch.float32) for t in batch)
        loss = engine(own)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / where[1])
    if out is not None:
        engine.save_checkpoint(out, client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}})
    engine.destroy()
    return losses


def in_group(cluster, **arguments):
    """Open the process group as the strategy does, and run the script."""
    strategy = DeepSpeedStrategy()
    strategy.receive(parts(cluster))
    strategy.connect(Net())
    strategy.setup_environment()
    try:
        return script(cluster, **arguments)
    finally:
        strategy.teardown()


def scripts(cluster, folder, stage):
    """Save what a script trains, also in bf16, and go on from it; return the next losses."""
    in_group(cluster, out=f"{folder}/{FLOAT32}", stage=stage)
    if stage > 1:
        in_group(cluster, out=f"{folder}/{BF16}", stage=stage, bf16=True)
        if cluster.global_rank == 0:
            convert_to_universal(Path(folder, FLOAT32, f"global_step{STEPS}"), Path(folder, UNIVERSAL))
    return in_group(cluster, out=None, stage=stage, source=f"{folder}/{FLOAT32}") if stage else None


def convert_to_universal(source, target):
    """Do what ``python -m deepspeed.checkpoint.ds_to_universal`` does, but in a process that has loaded it."""
    sys.argv[1:] = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv += ["--input_folder", str(source), "--output_folder", str(target)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


def went_on(cluster, target):
    """Load a converted checkpoint, and train."""
    strategy = DeepSpeedStrategy(stage=2)
    start(strategy, Tied(), parts(cluster))
    [optimizer] = strategy.optimizers
    state = PortableCheckpointIO().load_checkpoint(target)
    strategy.load_module_state_dict(state["state_dict"])
    strategy.load_sharded_optimizer_state(optimizer, state["optimizers"][0])
    losses = train(strategy, steps=STEPS)
    strategy.teardown()
    return losses


@pytest.fixture(scope="module")
def native(ranks, tmp_path_factory):
    """Folders with checkpoints of scripts, made when they are asked for, and the losses of going on from them."""
    made = {}

    def make(stage):
        if stage not in made:
            folder = tmp_path_factory.mktemp(f"stage{stage}")
            made[stage] = folder, ranks(scripts, folder=str(folder), stage=stage)[0]
        return made[stage]

    return make


def test_weights_of_stage_0_are_read_and_what_is_uncertain_is_left_out(native, caplog):
    converted = DeepSpeedCheckpointIO().load_checkpoint(native(0)[0] / FLOAT32)
    assert list(converted["state_dict"]) == list(Tied().state_dict())
    assert "optimizers" not in converted
    assert "not certain" in caplog.text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_script_has_saved_is_converted_and_goes_on(ranks, native, tmp_path, stage):
    folder, expected = native(stage)
    result = CliRunner().invoke(convert, [str(folder / FLOAT32), str(tmp_path / "c")])
    assert result.exit_code == 0, result.output
    assert "step 3, 1 optimizer" in result.output
    for found in ranks(went_on, target=str(tmp_path / "c")):
        assert found == pytest.approx(expected, rel=1e-6)
    converted = PortableCheckpointIO().load_checkpoint(tmp_path / "c")
    names = [name for group in converted["optimizers"][0]["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(n for n, p in Tied().named_parameters() if p.requires_grad)
    tied = converted["state_dict"]
    assert torch.equal(tied["blocks.0.up.weight"], tied["blocks.1.up.weight"])
    assert list(converted["state_dict"]) == list(Tied().state_dict())


@pytest.mark.parametrize("stage", [3, 2])
def test_rounded_weights_come_with_their_exact_ones(native, stage):
    converted = DeepSpeedCheckpointIO().load_checkpoint(native(stage)[0] / BF16)
    exact = converted["optimizers"][0]["fp32_weights"]
    assert len(exact) == len([p for p in Tied().parameters() if p.requires_grad])
    for name, weight in exact.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.bfloat16(), converted["state_dict"][name])


@pytest.mark.parametrize("stage", [3, 2])
def test_a_universal_checkpoint_says_the_same(native, stage):
    folder, _ = native(stage)
    same, universal = (DeepSpeedCheckpointIO().load_checkpoint(folder / name) for name in (FLOAT32, UNIVERSAL))
    assert_close(universal["state_dict"], same["state_dict"])
    for name, entry in same["optimizers"][0]["state"].items():
        assert_close(universal["optimizers"][0]["state"][name], entry)


class Bomb:
    def __reduce__(self):
        return (eval, ("open('exploded', 'w')",))


@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt"])
def test_a_file_that_would_run_code_is_refused(native, tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(native(2)[0] / FLOAT32, tmp_path / "c")
    victim = next((tmp_path / "c" / "global_step3").glob(pattern))
    torch.save({"module": Bomb(), "optimizer_state_dict": Bomb()}, victim)
    with pytest.raises(CheckpointError, match=r"' in it is of builtins\.eval, which cannot be read without"):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")
    victim.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


def test_what_users_have_put_beside_the_state_is_no_obstacle(native, tmp_path):
    expected = DeepSpeedCheckpointIO().load_checkpoint(native(2)[0] / FLOAT32)["state_dict"]
    shutil.copytree(native(2)[0] / FLOAT32, tmp_path / "c")
    file = next((tmp_path / "c" / "global_step3").glob("*model_states.pt"))
    torch.save({**torch.load(file, weights_only=False), "args": Namespace(act=torch.nn.ReLU, bomb=Bomb())}, file)
    assert_close(DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")["state_dict"], expected)
    assert not Path("exploded").exists()


def test_damaged_and_missing_files_are_named(native, tmp_path):
    shutil.copytree(native(2)[0] / FLOAT32, tmp_path / "c")
    [first, second] = sorted((tmp_path / "c" / "global_step3").glob("*optim_states.pt"))
    second.write_bytes(second.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{second.name}' is damaged"):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")
    second.unlink()
    with pytest.raises(CheckpointError, match="has the files of 1 of 2 ranks"):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")
    first.rename(second)
    with pytest.raises(CheckpointError, match=r"has the files of ranks \[1\] only"):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is no checkpoint of DeepSpeed"):
        DeepSpeedCheckpointIO().load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="only reads"):
        DeepSpeedCheckpointIO().save_checkpoint({}, tmp_path / "d")


def saved_natively(cluster, folder, stage):
    """Save beside a checkpoint, and remove both; go on here and with a script, and return what came of it."""
    strategy = DeepSpeedStrategy(stage=stage, save_native=True)
    start(strategy, Tied(), parts(cluster))
    train(strategy, steps=STEPS)
    strategy.components = replace(strategy.components, checkpoint_io=PortableCheckpointIO())
    checkpoint = {"epoch": 1, "global_step": STEPS, "state_dict": strategy.sharded_module_state()}
    target = Path(folder, "f", "c")
    strategy.save_checkpoint(checkpoint, target)
    refused = refusal(strategy, checkpoint, target)
    if strategy.is_global_zero:
        Path(folder, "f", "d.deepspeed").mkdir()
    found_first = refusal(strategy, checkpoint, target.with_name("d"))
    names = sorted(path.name for path in target.parent.iterdir())
    losses = train(strategy, steps=STEPS)
    if strategy.is_global_zero:
        shutil.copytree(f"{target}.deepspeed", f"{folder}/copy")
    strategy.barrier()
    strategy.remove_checkpoint(target)
    strategy.barrier()
    left = sorted(path.name for path in target.parent.iterdir())
    strategy.teardown()
    of_script = in_group(cluster, out=None, stage=stage, source=f"{folder}/copy")
    return losses, of_script, names, refused, found_first, left


def refusal(strategy, checkpoint, path):
    try:
        strategy.save_checkpoint(checkpoint, path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_script_without_dstrat_goes_on_from_what_was_saved_for_it(ranks, tmp_path, stage):
    (tmp_path / "f").mkdir()
    found = ranks(saved_natively, folder=str(tmp_path), stage=stage)
    for losses, of_script, names, refused, found_first, left in found:
        assert of_script == losses
        assert names == ["c", "c.deepspeed", "d", "d-v1.deepspeed", "d.deepspeed", "last"]
        assert "c' exists already, and none is ever written over" in refused
        assert found_first is None
        assert left == ["d", "d-v1.deepspeed", "d.deepspeed", "last"]
