"""A checkpoint of another training: what it says, and what goes on all the same."""

import pytest
import torch
from torch import nn

from dstrat import TorchCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError

FORMATS = pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO], ids=["file", "folder"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def save(quiet_trainer, loader, path):
    def save(module, io=PortableCheckpointIO):
        module.on_train_end = lambda: module.trainer.save_checkpoint(path)
        quiet_trainer(max_epochs=1, plugins=[io()]).fit(module, loader())

    return save


@pytest.fixture
def go_on(quiet_trainer, loader, path):
    def go_on(module, verb="fit", io=PortableCheckpointIO):
        getattr(quiet_trainer(max_epochs=2, plugins=[io()]), verb)(module, loader(), ckpt_path=path)

    return go_on


@pytest.fixture
def with_head(line_class):
    class WithHead(line_class):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 1)

    return WithHead


@FORMATS
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_weights_that_do_not_fit_are_an_error_with_the_checkpoint_and_their_names(
    make_line, with_head, save, go_on, path, verb, io
):
    save(make_line(), io)
    with pytest.raises(CheckpointError) as caught:
        go_on(with_head(), verb, io)
    assert str(caught.value) == (
        f"checkpoint {str(path)!r} cannot be loaded: the weights do not fit WithHead: missing head.weight, head.bias. "
        "Make the module as it was trained, or set strict_loading = False on it to load the others"
    )


@FORMATS
def test_weights_that_are_left_over_are_named_too(make_line, with_head, save, go_on, io):
    save(with_head(), io)
    with pytest.raises(CheckpointError, match=r"the weights do not fit Line: unexpected head\.weight, head\.bias\. "):
        go_on(make_line(), "test", io)


@FORMATS
def test_weights_of_another_shape_are_named(make_line, save, go_on, io):
    save(make_line(), io)
    module = make_line()
    module.layer = nn.Linear(8, 2)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: the weights do not fit Line: .* layer\.weight"):
        go_on(module, io=io)


@FORMATS
def test_what_a_module_leaves_out_of_its_checkpoints_stays_as_it_was_made(
    line_class, quiet_trainer, loader, save, go_on, path, caplog, io
):
    class Pretrained(line_class):
        def __init__(self):
            super().__init__()
            self.strict_loading = False
            self.frozen = nn.Linear(8, 8).requires_grad_(False)

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {name: value for name, value in state.items() if not name.startswith("frozen")}

    trained, other = Pretrained(), Pretrained()
    frozen = other.frozen.weight.clone()
    save(trained, io)
    go_on(other, "test", io)
    assert torch.equal(other.layer.weight, trained.layer.weight)
    assert torch.equal(other.frozen.weight, frozen)
    assert "do not fit Pretrained: missing frozen.weight, frozen.bias; the others are loaded" in caplog.text
    go_on(other, io=io)
    assert not torch.equal(other.layer.weight, trained.layer.weight)
    assert torch.equal(Pretrained.load_from_checkpoint(path).layer.weight, trained.layer.weight)
    with pytest.raises(CheckpointError, match=r"missing frozen\.weight"):
        Pretrained.load_from_checkpoint(path, strict=True)


def test_weights_that_a_run_in_other_processes_leaves_out_are_not_missed(line_class, quiet_trainer, loader, averaging):
    class Pretrained(line_class):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(8, 8).requires_grad_(False)

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {name: value for name, value in state.items() if not name.startswith("frozen")}

    module = Pretrained()
    before = module.layer.weight.clone()
    quiet_trainer(strategy=averaging(), devices=2, max_epochs=1).fit(module, loader())
    assert not torch.equal(module.layer.weight, before)


@FORMATS
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda layer: torch.optim.SGD([{"params": [value]} for value in layer.parameters()], lr=0.1),
            "is of 1 group of 2 parameters, and SGD has 2 groups of 1 and 1 parameters here",
        ),
        (
            lambda layer: torch.optim.Adagrad(layer.parameters()),
            "has no lr_decay, eps, initial_accumulator_value, which Adagrad needs: it is the state of another kind of",
        ),
    ],
    ids=["groups", "kind"],
)
def test_another_optimizer_is_an_error_that_says_how_it_differs(make_line, save, go_on, path, make, reason, io):
    save(make_line(), io)
    module = make_line()
    module.configure_optimizers = lambda: make(module.layer)
    with pytest.raises(CheckpointError) as caught:
        go_on(module, io=io)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {str(path)!r} cannot be loaded: the optimizer's state in the checkpoint ")
    assert reason in message
    assert message.endswith(
        " load the weights alone into the module (load_from_checkpoint does) and begin a new training"
    )
