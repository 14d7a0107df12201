"""Hardware of somebody else declares how it differs, and the Trainer, own loops and strategies act on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import dstrat
from dstrat import GradientSyncStrategy, OwnLoop, SingleDeviceStrategy, Trainer, TrainModule
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError
from dstrat.interfaces.strategy import Parts


class LazyAccelerator(CPUAccelerator):
    """Notes where graphs end."""

    def __init__(self):
        self.ends = []

    def end_graph(self, after):
        self.ends.append(after)


STEP = ["backward", "optimizer_step"]


def ends_of(quiet_trainer, module, loaders, **options):
    accelerator = LazyAccelerator()
    quiet_trainer(accelerator=accelerator, max_epochs=1, num_sanity_val_steps=0, **options).fit(module, *loaders)
    return accelerator.ends


def test_the_trainer_ends_a_graph_after_each_step(quiet_trainer, make_line, loader):
    module = make_line()
    module.validation_step = lambda batch, batch_idx: module.log("loss", batch[0].sum())
    number = len(loader())
    assert ends_of(quiet_trainer, make_line(), [loader()]) == STEP * number
    assert ends_of(quiet_trainer, module, [loader(), loader()]) == STEP * number + ["evaluation_step"] * number


def test_accumulated_batches_end_graphs_of_their_own(quiet_trainer, make_line, loader):
    ends = ends_of(quiet_trainer, make_line(), [loader()], accumulate_grad_batches=2)
    assert ends == ["backward", *STEP] * (len(loader()) // 2)


class SteppedByModule(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SteppingInHook(SteppedByModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure)


class Manual(SteppedByModule):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


@pytest.mark.parametrize("module", [SteppingInHook, Manual])
def test_steps_of_the_module_end_graphs(quiet_trainer, module):
    assert ends_of(quiet_trainer, module(), [DataLoader(torch.ones(6, 2), batch_size=2)]) == STEP * 3


def test_an_own_loop_ends_a_graph_after_each_step():
    accelerator = LazyAccelerator()

    def train(loop):
        module = nn.Linear(2, 1)
        loop.setup(module, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        for batch in loop.training_loader(DataLoader(torch.ones(4, 2), batch_size=2)):
            loop.backward(loop.compute(module, batch).sum())
            loop.step()
        with loop.evaluation():
            loop.compute(module, torch.ones(1, 2))

    OwnLoop(dstrat.build(strategy="single_device", accelerator=accelerator, devices=1)).launch(train)
    assert accelerator.ends == [*STEP, *STEP, "evaluation_step"]


class WithoutDoubles(TorchDispatchMode):
    """Fails where float64 is made, as a device without it does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        assert not isinstance(output, torch.Tensor) or output.dtype != torch.float64
        return output


class SingleAccelerator(CPUAccelerator):
    """Hardware without float64, of which each process sees one device, that it calls cpu:0."""

    def __init__(self):
        self.devices = []

    def supports_dtype(self, dtype):
        return dtype != torch.float64

    def get_parallel_devices(self, indices):
        return [torch.device("cpu", index) for index in indices]

    def device_in_process(self, device):
        return torch.device("cpu", 0)

    def setup(self, device=None):
        self.devices.append(device)


def test_values_are_read_without_a_dtype_that_the_hardware_lacks():
    strategy = SingleDeviceStrategy()
    strategy.receive(Parts(accelerator=SingleAccelerator()))
    tensors = [torch.tensor(0.1), torch.tensor(2**31 + 1), torch.tensor([0.5]), torch.tensor(True)]
    with WithoutDoubles():
        assert strategy.read_values(tensors) == [pytest.approx(0.1), 2**31 + 1, 0.5, 1.0]
        assert strategy.read_values([]) == []


def test_a_process_has_its_own_name_for_its_device():
    accelerator = SingleAccelerator()
    strategy = dstrat.build(strategy="single_device", accelerator=accelerator, devices=[3])
    strategy.setup_environment()
    assert strategy.root_device == torch.device("cpu", 0)
    assert strategy.assigned_device == torch.device("cpu", 3)
    assert accelerator.devices == [torch.device("cpu", 3)]


class Averaging(GradientSyncStrategy):
    start_method = "fork"

    def synchronize_gradients(self, gradients):
        pass


def test_each_rank_sets_up_the_device_that_the_machine_assigns():
    def devices(loop):
        strategy = loop.strategy
        (device,) = strategy.accelerator.devices
        indices = loop.all_gather(torch.tensor(device.index)).tolist()
        return str(strategy.root_device), str(strategy.assigned_device), indices

    strategy = dstrat.build(strategy=Averaging(), accelerator=SingleAccelerator(), devices=[2, 5])
    assert OwnLoop(strategy).launch(devices) == ("cpu:0", "cpu:2", [2, 5])


class EightBits(TruePrecision):
    """Computes some products in 8-bit floats."""

    hint_unsupported = "or take EightBits(emulate=True)"

    @property
    def dtypes(self):
        return (*super().dtypes, torch.float8_e4m3fn)


def test_a_precision_names_all_dtypes_that_the_hardware_must_have():
    with pytest.raises(ConflictError) as caught:
        Trainer(precision=EightBits(), accelerator="cpu", devices=1)
    assert "needs torch.float8_e4m3fn, in which accelerator 'cpu' from dstrat 0.1.0 does not compute" in str(
        caught.value
    )
    assert str(caught.value).endswith("), or take EightBits(emulate=True)")
