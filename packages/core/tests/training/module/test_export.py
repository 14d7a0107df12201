from __future__ import annotations

import copy
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

from dstrat import DataModule, TrainModule
from dstrat.errors import MissingRequirementError, MisuseError


class Net(TrainModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.relu(self.layer(x)))

    def training_step(self, batch, batch_idx):
        loss = self(batch).sum()
        self.log("loss", loss)
        return loss


def test_a_frozen_module_trains_nothing_until_it_is_unfrozen():
    module = Net()
    assert module.freeze() is module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.dropout.training
    assert module.unfreeze() is module
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.dropout.training


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_gives_what_the_module_gives_in_evaluation_mode(method, tmp_path):
    module = Net()
    module.layer.eval()
    x = torch.randn(64, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of every function of TorchScript, which the caller has asked for
        script = module.to_torchscript(tmp_path / "deep" / "it.pt", method, example_inputs=x)
    assert module.training
    assert module.dropout.training
    assert not module.layer.training
    loaded = torch.jit.load(tmp_path / "deep" / "it.pt")
    for one in (script, loaded):
        assert torch.equal(one(x), module.eval()(x))


def test_what_the_trainer_reads_of_a_module_does_not_concern_torchscript():
    module = Net()
    module.automatic_optimization = False
    module.example_input_array = {"x": [1, "mixed"]}
    assert module.to_torchscript()(torch.ones(1, 4)).shape == (1, 2)


def test_torchscript_traces_with_the_modules_own_example():
    module = Net()
    module.example_input_array = {"x": torch.randn(3, 4)}
    assert module.to_torchscript(method="trace")(torch.ones(5, 4)).shape == (5, 2)


def test_tracing_needs_no_gradients_and_takes_its_input_to_the_modules_device():
    class Looking(Net):
        def forward(self, x):
            assert not torch.is_grad_enabled()
            return super().forward(x)

    script = Looking().to("meta").to_torchscript(method="trace", example_inputs=torch.ones(1, 4))
    assert script(torch.ones(2, 4, device="meta")).shape == (2, 2)


def test_a_module_in_a_run_can_be_exported(quiet_trainer, line_class, loader):
    class Exported(line_class):
        def forward(self, x):
            return self.layer(x)

        def on_train_end(self):
            self.script = self.to_torchscript()
            assert self.trainer.is_running

    module = Exported()
    quiet_trainer(max_steps=1).fit(module, loader())
    assert torch.equal(module.script(torch.ones(1, 8)), module(torch.ones(1, 8)))


def test_tracing_without_an_input_and_unknown_methods_are_errors():
    with pytest.raises(MisuseError, match=r"pass example_inputs, or set Net\.example_input_array"):
        Net().to_torchscript(method="trace")
    with pytest.raises(MisuseError, match="the method is 'script' or 'trace'"):
        Net().to_torchscript(method="scipt")


def test_without_onnx_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not there
    with pytest.raises(MissingRequirementError, match=r'onnx .*not installed: pip install "dstrat\[onnx\]"'):
        Net().to_onnx("it.onnx", torch.ones(1, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's exporter uses what torch calls deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sample", [torch.ones(3, 4), pytest.param({"x": torch.ones(3, 4)}, marks=pytest.mark.variant)])
def test_onnx_holds_the_module_in_evaluation_mode(tmp_path, sample):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    module = Net()
    module.example_input_array = sample
    module.to_onnx(tmp_path / "deep" / "it.onnx")
    assert module.dropout.training
    operations = [node.op_type for node in onnx.load(tmp_path / "deep" / "it.onnx").graph.node]
    assert operations == ["Gemm", "Relu"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_copies_of_an_attached_module_or_data_module_belong_to_no_trainer(quiet_trainer, copied):
    trainer = quiet_trainer()
    trainer.unpicklable = lambda: None
    module, data = Net(), DataModule()
    module.attach(trainer)
    data.attach(trainer)
    other = copied(module)
    with pytest.raises(MisuseError, match="Net is not attached to a Trainer"):
        other.trainer  # noqa: B018
    assert copied(data).trainer is None
    assert module.trainer is data.trainer is trainer
    assert torch.equal(other.layer.weight, module.layer.weight)
    other.layer.weight.data.zero_()
    assert module.layer.weight.any()


def test_device_and_dtype_are_those_of_the_parameters_now():
    module = Net()
    assert (module.device.type, module.dtype) == ("cpu", torch.float32)
    module.to("meta", torch.bfloat16)
    assert (module.device.type, module.dtype) == ("meta", torch.bfloat16)


def test_device_and_dtype_of_a_module_without_parameters_are_those_of_its_buffers_or_the_defaults():
    module = TrainModule()
    assert (module.device.type, module.dtype) == ("cpu", torch.float32)
    module.register_buffer("count", torch.ones(1, dtype=torch.int64, device="meta"))
    module.register_buffer("mean", torch.ones(1, dtype=torch.float64, device="meta"))
    assert (module.device.type, module.dtype) == ("meta", torch.float64)
