"""Training with products in 8-bit floats, emulated where the hardware has none."""

import pytest
import torch
from packages.torchao.tests.language_model import (
    BATCH,
    LanguageModel,
    Losses,
    SavesHalfway,
    loader,
    losses_of,
    quiet_trainer,
)
from tests.ranks import each, in_ranks
from torch import nn

from dstrat import Callback, Trainer
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.errors import ConflictError, DstratError, RequestError
from dstrat_torchao import Float8Precision

pytest.importorskip("torchao", reason="torchao is not installed")

STEPS = 30
FLAGS = ["float8", "float8-rowwise", "float8-rowwise-gw-hp"]


@pytest.fixture(scope="module")
def plain_losses():
    return {base: losses_of(base, steps=STEPS) for base in ("32-true", "bf16-mixed", "bf16-true")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "base"),
    [
        ("float8", "bf16-mixed"),
        *(pytest.param(flag, "bf16-mixed", marks=pytest.mark.variant) for flag in FLAGS if flag != "float8"),
        pytest.param("float8", "32-true", marks=pytest.mark.variant),
        pytest.param("float8", "bf16-true", marks=pytest.mark.variant),
    ],
)
def test_losses_stay_near_those_of_the_base(flag, base, plain_losses):
    losses = losses_of(Float8Precision(flag, base, emulate=True), steps=STEPS)
    assert losses == pytest.approx(plain_losses[base], rel=0.02)
    assert losses != plain_losses[base]  # something was rounded
    assert losses[-1] < 0.8 * losses[0]


def test_layers_are_converted_for_the_run_only():
    kinds = []

    class Recorder(Callback):
        def on_train_start(self, trainer, module):
            kinds.extend(type(layer).__name__ for layer in module.modules() if isinstance(layer, nn.Linear))

    model = LanguageModel()
    names = list(model.state_dict())
    head = model.head
    losses_of(Float8Precision(emulate=True), model, steps=2, callbacks=[Recorder()])
    assert set(kinds) == {"Float8Linear"}
    assert {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    assert model.head is head
    assert list(model.state_dict()) == names
    assert not torch.equal(model.head.weight, LanguageModel().head.weight)  # trained


def test_layers_of_other_sizes_are_left_out_and_logged(caplog):
    model = LanguageModel()
    model.head = nn.Linear(64, 33)
    with caplog.at_level("INFO", "dstrat_torchao.float8"):
        losses_of(Float8Precision(emulate=True), model, steps=1)
    assert "precision 'float8' leaves these linear layers as they are: head" in caplog.text


def test_a_function_selects_layers():
    seen = []

    class Recorder(Callback):
        def on_train_start(self, trainer, module):
            seen.extend(name for name, layer in module.named_modules() if type(layer).__name__ == "Float8Linear")

    only_up = Float8Precision(emulate=True, layers=lambda layer, name: name.endswith(".up"))
    losses_of(only_up, steps=1, callbacks=[Recorder()])
    assert seen == ["blocks.0.up", "blocks.1.up"]


def module_filter_fn(mod: torch.nn.Module, fqn: str):
    """The filter of torchao's own example."""
    # don't convert the last module
    if fqn == "head":
        return False
    # don't convert linear modules with weight dimensions not divisible by 16
    return not (isinstance(mod, torch.nn.Linear) and (mod.in_features % 16 != 0 or mod.out_features % 16 != 0))


@pytest.mark.variant
def test_the_filter_of_the_example_of_torchao_works_with_a_compiled_module():
    precision = Float8Precision(base="bf16-true", emulate=True, layers=module_filter_fn)
    expected = losses_of(precision, steps=3)
    model = LanguageModel()
    model.compile(backend="aot_eager")
    assert losses_of(precision, model, steps=3) == pytest.approx(expected, rel=1e-2)


def test_a_resumed_training_is_bit_identical(tmp_path):
    through = losses_of(Float8Precision(emulate=True), steps=6, callbacks=[SavesHalfway(tmp_path / "half")])
    recorder = Losses()
    trainer = quiet_trainer(precision=Float8Precision(emulate=True), callbacks=[recorder])
    trainer.fit(LanguageModel(seed=5), loader(6), ckpt_path=tmp_path / "half")
    assert recorder.losses == through[3:]


def test_a_checkpoint_goes_on_in_full_precision(tmp_path):
    losses_of(Float8Precision(emulate=True), steps=6, callbacks=[SavesHalfway(tmp_path / "half")])
    recorder = Losses()
    quiet_trainer(callbacks=[recorder]).fit(LanguageModel(seed=5), loader(6), ckpt_path=tmp_path / "half")
    assert recorder.losses == pytest.approx(losses_of("32-true", steps=6)[3:], rel=0.02)


def trained(cluster, strategy, flag):
    recorder, size = Losses(), BATCH // cluster.world_size
    trainer = quiet_trainer(strategy, cluster, precision=Float8Precision(flag, emulate=True), callbacks=[recorder])
    batches = loader(6).dataset.tensors[0].unflatten(0, (6, cluster.world_size, size))[:, cluster.global_rank]
    data = torch.utils.data.TensorDataset(batches.flatten(0, 1))
    model = LanguageModel()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=size))
    return recorder.losses, sorted(name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_two_ranks_have_nearly_the_losses_of_one():
    names = [("ddp", "float8"), ("fsdp", "float8"), ("fsdp", "float8-rowwise")]
    cases = {(strategy, flag): {"strategy": strategy, "flag": flag} for strategy, flag in names}
    for found in in_ranks(each, function=trained, cases=cases):
        for (_, flag), (losses, names) in found.items():
            # Scales are of the batch of a rank, and of the weights that it gathers in bfloat16.
            assert losses == pytest.approx(losses_of(Float8Precision(flag, emulate=True), steps=6), rel=0.01)
            assert names == sorted(name for name, _ in LanguageModel().named_parameters())


def test_without_such_hardware_the_plan_says_what_to_do():
    with pytest.raises(ConflictError) as caught:
        Trainer(precision="float8", accelerator="cpu", devices=1)
    assert "precision 'float8' needs torch.float8_e4m3fn, in which accelerator 'cpu'" in str(caught.value)
    assert "does not compute here" in str(caught.value)
    assert str(caught.value).endswith(
        "or round to 8 bits without such hardware: precision=Float8Precision(emulate=True)"
    )


@pytest.mark.slow
def test_an_estimate_needs_no_such_hardware():
    def make():
        return TrainingSetup(module=LanguageModel(), batch=loader(1).dataset.tensors, make_optimizers=optimizers)

    optimizers = LanguageModel.configure_optimizers
    size = measure_training(make, Float8Precision(), device_type="cuda", world_size=1, ranks_per_machine=1)
    assert size.parameters == sum(4 * parameter.numel() for parameter in LanguageModel().parameters())


class Tiny(LanguageModel):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(), nn.Linear(64, 33)


def test_a_module_without_such_layers_is_refused():
    with pytest.raises(RequestError, match=r"'float8' converts no layer of Tiny: it needs nn\.Linear layers"):
        losses_of(Float8Precision(emulate=True), Tiny(), steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, r"Float8Precision\('fp8'\) is not possible: choose one of float8, float8-rowwise"),
        ({"base": "16-mixed"}, r"base='16-mixed'\) is not possible: choose one of bf16-mixed, bf16-true, 32-true"),
        ({"config": {"emulates": True}}, r"has no option emulates: choose some of cast_config_grad_output"),
        ({"config": {"enable_fsdp_float8_all_gather": True}}, "which checkpoints and optimizers of other precisions"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(DstratError, match=message):
        Float8Precision(**options)


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao calls it
@pytest.mark.cuda
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_losses_on_a_gpu_stay_near_those_of_bfloat16(flag, strategy):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no products in 8 bits")
    expected = losses_of("bf16-mixed", strategy=strategy, device="cuda")
    assert losses_of(flag, strategy=strategy, device="cuda") == pytest.approx(expected, rel=0.05)


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao calls it
@pytest.mark.cuda
@pytest.mark.parametrize("flag", FLAGS)
def test_products_of_a_gpu_are_those_of_its_emulation(flag):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no products in 8 bits")
    emulated = losses_of(Float8Precision(flag, emulate=True), steps=4, device="cuda")
    assert losses_of(flag, steps=4, device="cuda") == pytest.approx(emulated, rel=0.01)


@pytest.mark.cuda
def test_an_older_gpu_is_named():
    if torch.cuda.get_device_capability() >= (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has products in 8 bits")
    with pytest.raises(DstratError, match=r"needs a GPU of capability 8\.9 or newer"):
        losses_of("float8", steps=1, device="cuda")
