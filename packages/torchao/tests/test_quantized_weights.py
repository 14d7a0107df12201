"""Frozen layers with weights in 8 and 4 bits, for evaluation and beside what is trained."""

import copy

import pytest
import torch
from packages.torchao.tests.language_model import (
    BATCH,
    Adapted,
    LanguageModel,
    Losses,
    SavesHalfway,
    loader,
    losses_of,
    quiet_trainer,
)
from tests.ranks import each, in_ranks
from torch import nn

from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat_torchao import QuantizedWeightsPrecision

pytest.importorskip("torchao", reason="torchao is not installed")

SMALL = {"scaler_block_size": 16}  # so that layers of 1024 weights and more are converted
FORMATS = {"int8-weights": {}, "nf4-weights": SMALL}


def precision_of(flag, base="32-true", **options):
    return QuantizedWeightsPrecision(flag, base, options=FORMATS[flag], **options)


@pytest.fixture(scope="module")
def trained_state():
    model = LanguageModel()
    losses_of("32-true", model, steps=60)
    return model.state_dict()


def trained_model(state, cls=LanguageModel):
    model = cls()
    model.load_state_dict(state, strict=False)
    return model


def outputs_and_loss(model, precision="32-true"):
    model.requires_grad_(False)
    outputs = quiet_trainer(precision=precision).predict(model, loader(2, seed=2))
    trainer = quiet_trainer(precision=precision)
    trainer.validate(model, loader(2, seed=2), verbose=False)
    return torch.cat(outputs), float(trainer.callback_metrics["val_loss"])


ACCURACY = {"int8-weights": (0.015, 0.001), "nf4-weights": (0.15, 0.05)}  # of outputs, and of the loss


@pytest.mark.slow
@pytest.mark.parametrize("flag", FORMATS)
def test_evaluation_comes_close_to_that_of_full_weights(flag, trained_state):
    expected, expected_loss = outputs_and_loss(trained_model(trained_state))
    outputs, loss = outputs_and_loss(trained_model(trained_state), precision_of(flag))
    tolerance, loss_tolerance = ACCURACY[flag]
    assert 0 < (outputs - expected).norm() / expected.norm() < tolerance
    assert loss == pytest.approx(expected_loss, rel=loss_tolerance)


@pytest.mark.parametrize(("flag", "largest"), [("int8-weights", 0.3), ("nf4-weights", 0.2)])
def test_a_weight_takes_a_fraction_of_the_memory(flag, largest):
    layer = nn.Linear(256, 256).requires_grad_(False)
    module = precision_of(flag).connect(nn.Sequential(layer))
    assert sum(tensor.nbytes for tensor in module[0].inner_tensors().values()) < largest * layer.weight.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("flag", FORMATS)
@pytest.mark.parametrize("base", ["32-true", "bf16-mixed", "bf16-true"])
def test_adapter_and_head_learn_beside_rounded_layers(flag, base, trained_state):
    model = trained_model(trained_state, Adapted)
    before = copy.deepcopy(model.state_dict())
    expected = losses_of(base, trained_model(trained_state, Adapted), steps=20)
    losses = losses_of(precision_of(flag, base), model, steps=20)
    assert losses == pytest.approx(expected, rel=0.1 if flag == "nf4-weights" else 0.02)
    after = model.state_dict()
    assert list(after) == list(before)
    changed = {name for name in before if not torch.allclose(after[name].float(), before[name], atol=0.2)}
    assert all(name.startswith(("adapter", "head")) for name in changed)
    assert not torch.equal(after["adapter.1.weight"].float(), before["adapter.1.weight"])


@pytest.mark.parametrize("flag", FORMATS)
def test_a_resumed_training_is_bit_identical(flag, tmp_path):
    through = losses_of(precision_of(flag), Adapted(), steps=6, callbacks=[SavesHalfway(tmp_path / "half")])
    recorder = Losses()
    model = Adapted(seed=5)  # all values come from the checkpoint
    quiet_trainer(precision=precision_of(flag), callbacks=[recorder]).fit(model, loader(6), ckpt_path=tmp_path / "half")
    assert recorder.losses == through[3:]


def test_a_checkpoint_is_loaded_in_full_precision(tmp_path):
    model = Adapted()
    losses_of(precision_of("int8-weights"), model, steps=4, callbacks=[SavesHalfway(tmp_path / "half")])
    recorder = Losses()
    plain = Adapted(seed=5)
    quiet_trainer(callbacks=[recorder], max_steps=4).fit(plain, loader(6), ckpt_path=tmp_path / "half")
    assert len(recorder.losses) == 1
    assert torch.equal(plain.blocks[0].up.weight, model.state_dict()["blocks.0.up.weight"])


@pytest.mark.parametrize("flag", FORMATS)
def test_a_second_run_goes_on_with_the_same_weights(flag):
    model = Adapted()
    first = losses_of(precision_of(flag, "bf16-true"), model, steps=3)
    before = model.state_dict()["blocks.0.up.weight"]
    second = losses_of(precision_of(flag, "bf16-true"), model, steps=3)
    assert torch.equal(model.state_dict()["blocks.0.up.weight"], before)
    assert second[0] < first[0]
    twin = copy.deepcopy(model)
    tokens = loader(1).dataset.tensors[0][:, :-1]
    assert torch.equal(twin(tokens), model(tokens))


def share(cluster, steps):
    size = BATCH // cluster.world_size
    own = loader(steps).dataset.tensors[0].unflatten(0, (steps, cluster.world_size, size))[:, cluster.global_rank]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(own.flatten(0, 1)), batch_size=size)


def trained(cluster, strategy, flag, path):
    recorder = Losses()
    saves = SavesHalfway(path)
    trainer = quiet_trainer(strategy, cluster, precision=precision_of(flag), callbacks=[recorder, saves])
    trainer.fit(Adapted(), share(cluster, 6))
    again = Losses()
    trainer = quiet_trainer(strategy, cluster, precision=precision_of(flag), callbacks=[again])
    model = Adapted(seed=5)
    trainer.fit(model, share(cluster, 6), ckpt_path=path)
    return recorder.losses, again.losses


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_and_resume(tmp_path):
    names = [("ddp", "int8-weights"), ("fsdp", "int8-weights"), ("fsdp", "nf4-weights")]
    cases = {pair: {"strategy": pair[0], "flag": pair[1], "path": str(tmp_path / "-".join(pair))} for pair in names}
    for found in in_ranks(each, function=trained, cases=cases):
        for (_, flag), (losses, resumed) in found.items():
            assert losses == pytest.approx(losses_of(precision_of(flag), Adapted(), steps=6), rel=1e-5)
            assert resumed == losses[3:]


def validated(cluster, path):
    trainer = quiet_trainer("fsdp", cluster, precision=precision_of("int8-weights"))
    model = Adapted(seed=5)
    trainer.validate(model, share(cluster, 2), ckpt_path=path, verbose=False)
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.slow
def test_a_sharded_evaluation_takes_frozen_weights_from_a_checkpoint(tmp_path):
    model = Adapted()
    losses_of(precision_of("int8-weights"), model, steps=3, callbacks=[SavesHalfway(tmp_path / "half")])
    trainer = quiet_trainer(precision=precision_of("int8-weights"))
    trainer.validate(model, loader(2), verbose=False)
    expected = float(trainer.callback_metrics["val_loss"])
    for loss in in_ranks(validated, path=str(tmp_path / "half")):
        assert loss == pytest.approx(expected, rel=0.01)


def differing(cluster):
    with pytest.raises(MisuseError, match=r"frozen layer 'blocks.0.inputs' has other values on another rank"):
        losses_of(precision_of("int8-weights"), Adapted(cluster.global_rank), 2, strategy="ddp", cluster=cluster)


def test_ranks_with_other_frozen_weights_are_refused():
    in_ranks(differing)


def test_shared_layers_stay_shared():
    layer = nn.Linear(64, 64).requires_grad_(False)
    module = precision_of("int8-weights").connect(nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)}))
    assert module["a"] is module["b"][0]


def test_without_a_frozen_layer_nothing_is_converted_and_that_is_logged(caplog):
    losses = losses_of("int8-weights", steps=2)
    assert losses == losses_of("bf16-mixed", steps=2)
    assert "converts no layer of LanguageModel, of which no selected nn.Linear layer is frozen" in caplog.text


def test_a_layer_that_the_format_does_not_fit_is_named():
    with pytest.raises(RequestError, match=r"cannot convert layer 'blocks.0.inputs' with a weight of \(192, 64\)"):
        losses_of("nf4-weights", Adapted(), steps=1)  # 16384 values have one scale of scales


def test_weights_of_another_shape_are_refused():
    module = precision_of("int8-weights").connect(nn.Sequential(nn.Linear(8, 4).requires_grad_(False)))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        module.load_state_dict(nn.Sequential(nn.Linear(8, 5)).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0\.weight\""):
        module.load_state_dict({"0.bias": torch.zeros(4)})


def test_layers_without_values_are_refused():
    with pytest.raises(MisuseError, match="layer '0', which is on the meta device"):
        precision_of("int8-weights").connect(nn.Sequential(nn.Linear(8, 4, device="meta").requires_grad_(False)))


def test_an_unknown_precision_is_refused():
    with pytest.raises(DstratError, match=r"\('int4-weights'\) is not possible: choose one of int8-weights, nf4"):
        QuantizedWeightsPrecision("int4-weights")


@pytest.mark.cuda
@pytest.mark.parametrize("flag", FORMATS)
def test_weights_move_to_a_gpu_and_back(flag, trained_state):
    expected, _ = outputs_and_loss(trained_model(trained_state), precision_of(flag))
    model = trained_model(trained_state).requires_grad_(False)
    trainer = quiet_trainer(device="cuda", precision=precision_of(flag))
    outputs = torch.cat([output.cpu() for output in trainer.predict(model, loader(2, seed=2))])
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-3)
    assert model.blocks[0].up.weight.device.type == "cpu"
