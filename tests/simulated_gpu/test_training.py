"""Whole runs on simulated GPUs: no wait is missing, ranks keep to their devices, memory stays within limits."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from tests.ranks import in_ranks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, OwnLoop, Trainer, TrainModule, build
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.data.prefetch import prefetch
from dstrat.interfaces.batch import mover_to
from dstrat.interfaces.pipeline import Pipeline
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.testing import simulated_gpu
from dstrat.testing.simulated_gpu import synchronizations
from dstrat_diloco import DiLoCoStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_mesh import MeshStrategy

DEVICE = "simgpu:0"


class Net(TrainModule):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def on_train_batch_start(self, batch, batch_idx):
        assert self.device == self.trainer.strategy.root_device  # also where it has no first layer, or an offloaded one

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.mse_loss(self.layers(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(**options):
    inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3]), batch_size=4, **options)


def make_trainer(cluster=None, accelerator="simulated_gpu", **options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    ranks = {} if cluster is None else {"plugins": [cluster], "devices": cluster.world_size}
    return Trainer(accelerator=accelerator, **{"devices": 1, "max_epochs": 2, **ranks} | quiet | options)


def weights(net):
    return [parameter.detach().cpu() for parameter in net.parameters()]


def trained(**options):
    net = Net()
    make_trainer(**options).fit(net, loader(), loader())
    return weights(net)


def equal(one, other):
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_training_equals_that_on_the_cpu_bit_for_bit():
    assert equal(trained(), trained(accelerator="cpu"))


class Prepared(Net):
    """Has its optimizer, tied layers and a mark of a parameter before the run."""

    def __init__(self, prepare=lambda net: None):
        super().__init__()
        self.layers[2].bias = self.layers[2].weight_bias = nn.Parameter(torch.zeros(3))
        self.layers[0].weight.mark = "first"
        self.kept = prepare(self)  # before the optimizer, as it may add layers
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return self.optimizer


def trained_with_prepared_optimizer(prepare=lambda net: None, **options):
    net = Prepared(prepare)
    before = dict(net.named_parameters(remove_duplicate=False))
    classes = {name: type(parameter) for name, parameter in before.items()}
    make_trainer(**options).fit(net, loader())
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert classes == {name: type(parameter) for name, parameter in after.items()}
    assert net.layers[2].bias is net.layers[2].weight_bias
    assert net.layers[0].bias.device.type == "cpu"
    momentum = [state["momentum_buffer"] for state in net.optimizer.state.values()]
    assert {buffer.device.type for buffer in momentum} == {"cpu"}
    assert all(buffer.any() for buffer in momentum)
    return net


def test_parameters_are_the_same_objects_during_a_run_and_after_it():
    nets = trained_with_prepared_optimizer(), trained_with_prepared_optimizer(accelerator="cpu")
    assert equal(*map(weights, nets))
    assert nets[0].layers[0].weight.mark == "first"


def referred_to_weakly(net):
    return [weakref.ref(parameter) for parameter in net.parameters()]


def in_a_graph(net):
    return net.layers(torch.ones(1, 6, requires_grad=True))  # of a loss that the program has kept, for example


class Marked(nn.Parameter):
    pass


def of_another_class(net):
    net.layers[0].weight = Marked(net.layers[0].weight.detach())


class LastOutput(nn.RNN):
    def forward(self, inputs):
        return super().forward(inputs.unsqueeze(1))[0][:, 0]  # the batch is one sequence


def in_an_rnn(net):
    net.layers.append(LastOutput(3, 3))  # has weak references to them, and a list from which it computes


def in_normalized_weights(net):
    nn.utils.parametrizations.weight_norm(net.layers[0])


def averaged_apart(net):
    net.average = torch.optim.swa_utils.AveragedModel(net.layers)  # a copy, as for an exponential average
    net.average.requires_grad_(False)
    net.on_train_batch_end = lambda *_args: net.average.update_parameters(net.layers)


@pytest.mark.parametrize(
    "prepare",
    [referred_to_weakly, in_a_graph, of_another_class, in_an_rnn, in_normalized_weights, averaged_apart],
    ids=lambda prepare: prepare.__name__,
)
def test_parameters_are_the_same_objects_whatever_refers_to_them(prepare):
    nets = [trained_with_prepared_optimizer(prepare, accelerator=name) for name in ("simulated_gpu", "cpu")]
    torch.testing.assert_close(*map(weights, nets))  # not equal: an RNN has its own kernels on the CPU


def note_device(devices, parameter):
    devices.append(parameter.device.type)


def test_hooks_of_parameters_run_on_the_device_and_after_the_run():
    net, on_cpu, devices = Net(), Net(), []
    for module in (net, on_cpu):
        module.layers[0].weight.register_hook(lambda gradient: gradient * 2)
        module.layers[0].bias.register_hook(torch.zeros_like)
        module.layers[2].bias.register_post_accumulate_grad_hook(partial(note_device, devices))
    make_trainer(max_steps=2).fit(net, loader())
    make_trainer(max_steps=2, accelerator="cpu").fit(on_cpu, loader())
    assert equal(weights(net), weights(on_cpu))
    assert devices == ["simgpu"] * 2 + ["cpu"] * 2
    net.layers(torch.ones(4, 6)).sum().backward()
    assert devices[4:] == ["cpu"]
    assert not net.layers[0].bias.grad.any()


def test_parameters_are_the_same_objects_where_memory_ends_as_they_move():
    net = Prepared(lambda net: setattr(net, "last", nn.Sequential(nn.Linear(99, 99), nn.Linear(8, 3))))
    net.last[1].weight = net.layers[2].weight
    before = dict(net.named_parameters(remove_duplicate=False))
    with simulated_gpu.limited_memory(torch.simgpu.memory_allocated() + 9999), pytest.raises(torch.OutOfMemoryError):
        make_trainer().fit(net, loader())
    assert all(parameter is before[name] for name, parameter in net.named_parameters(remove_duplicate=False))
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


def test_lazy_layers_get_their_shape_on_the_device():
    net = Net()
    net.layers[0] = nn.LazyLinear(8)
    make_trainer().fit(net, loader())
    assert net.layers[0].weight.shape == (8, 6)


# Batches


def copied(batches):
    return prefetch(batches, mover_to(torch.device(DEVICE), pins=True), torch.device(DEVICE))


def test_batches_arrive_whole_while_steps_compute():
    host = [torch.full((4,), float(index)) for index in range(6)]
    total, sums = torch.zeros(4, device=DEVICE), []
    for batch in copied(host):
        total = total + batch * 2
        sums.append(total)
        del batch
    assert [one[0].item() for one in sums] == [0, 2, 6, 12, 20, 30]


def test_copying_ahead_lets_the_host_never_wait():
    with simulated_gpu.synchronizations() as waits:
        for batch in copied(torch.ones(4) for _ in range(5)):
            batch + 1
            del batch
    assert waits == []


def test_batches_of_all_epochs_are_copied_on_one_stream():
    streams = set()  # each would keep memory for itself

    def move(batch):
        streams.add(torch.accelerator.current_stream(DEVICE))
        return batch.to(DEVICE, non_blocking=True)

    for _ in range(3):
        assert [batch.tolist() for batch in prefetch([torch.ones(1)], move, torch.device(DEVICE))] == [[1]]
    assert len(streams) == 1


class CountedSamples(TensorDataset):
    """Counts the samples that this process has loaded."""

    loaded = 0

    def __getitem__(self, index):
        self.loaded += 1
        return super().__getitem__(index)


class CountingNet(Net):
    """Notes in each step how many samples have been loaded."""

    def __init__(self, samples):
        super().__init__()
        self.samples, self.counts = samples, []

    def training_step(self, batch, batch_idx):
        self.counts.append(self.samples.loaded)
        return super().training_step(batch, batch_idx)


def counted_by_trainer(net, batches):
    make_trainer(max_epochs=1).fit(net, batches)


def counted_by_loop(net, batches):
    def count(loop):
        loop.setup(net, lambda net: torch.optim.SGD(net.parameters()))
        for _ in loop.training_loader(batches):
            net.counts.append(net.samples.loaded)

    OwnLoop(build(strategy="single_device", accelerator="simulated_gpu", devices=1)).launch(count)


@pytest.mark.parametrize("count", [counted_by_trainer, counted_by_loop])
def test_samples_that_this_process_loads_are_not_read_ahead(count):
    samples = CountedSamples(torch.zeros(12, 6), torch.zeros(12, 3))  # a resume would draw their random numbers again
    net = CountingNet(samples)
    count(net, DataLoader(samples, batch_size=4))
    assert net.counts == [4, 8, 12]


# Checkpoints


class Saves(Callback):
    """Saves after some steps, and notes the weights of then."""

    def __init__(self, path, step=5):
        self.path, self.step, self.weights = path, step, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.weights = {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_checkpoint_has_the_weights_of_its_step(is_asynchronous, tmp_path):
    io, saves = PortableCheckpointIO(), Saves(tmp_path / "saved")
    make_trainer(callbacks=[saves], plugins=[AsyncCheckpointIO(io) if is_asynchronous else io]).fit(Net(), loader())
    loaded = io.load_checkpoint(saves.path)["state_dict"]
    assert loaded.keys() == saves.weights.keys()
    assert equal(loaded.values(), saves.weights.values())


@pytest.mark.parametrize("stages", [False, True], ids=["saved", "staged"])
def test_a_save_waits_for_a_step_in_another_stream(stages, tmp_path):
    layer, stream = nn.Linear(4, 4, device=DEVICE), torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, torch.no_grad():
        layer.weight.fill_(3)
    io = PortableCheckpointIO()
    prepared = AsyncCheckpointIO(io) if stages else io
    prepared.save_checkpoint({"state_dict": layer.state_dict()}, tmp_path / "saved")
    with torch.no_grad():
        layer.weight.fill_(4)
    prepared.teardown()
    assert io.load_checkpoint(tmp_path / "saved")["state_dict"]["weight"].unique().tolist() == [3]


def test_a_background_save_of_one_file_waits_once_for_all_copies(tmp_path):
    layers = nn.Sequential(*(nn.Linear(4, 4, device=DEVICE) for _ in range(4)))
    layers[3].weight = layers[0].weight
    with torch.no_grad():
        layers[0].weight.fill_(3)
    io = AsyncCheckpointIO(TorchCheckpointIO())
    with simulated_gpu.synchronizations() as waits:
        io.save_checkpoint({"state_dict": layers.state_dict()}, tmp_path / "saved")
        with torch.no_grad():
            layers[0].weight.fill_(4)
    io.teardown()
    assert [wait.cause for wait in waits] == ["synchronize"]
    loaded = io.load_checkpoint(tmp_path / "saved")["state_dict"]
    assert loaded["0.weight"].unique().tolist() == loaded["3.weight"].unique().tolist() == [3]


# Several devices


def fit_save_and_predict(cluster, strategy, path, checkpoint_io):
    saves, net = Saves(path), Net()
    plugins = {"plugins": [cluster, checkpoint_io()], "strategy": strategy}
    make_trainer(cluster, callbacks=[saves], **plugins).fit(net, loader(), loader())
    resumed = make_trainer(cluster, **plugins)
    resumed.fit(net, loader(), ckpt_path=path)
    predictions = resumed.predict(net, loader())
    return simulated_gpu.touched_devices(), {str(batch.device) for batch in predictions}


@pytest.mark.parametrize("checkpoint_io", [PortableCheckpointIO, TorchCheckpointIO])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_has_memory_of_its_own_device_alone(strategy, checkpoint_io, tmp_path):
    ended = in_ranks(fit_save_and_predict, strategy=strategy, path=tmp_path / "saved", checkpoint_io=checkpoint_io)
    assert ended == [([0], {"cpu"}), ([1], {"cpu"})]


class Scaled(Net):
    """Limits scalars in the step, in place and by their data, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(0.3)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.scale.clamp_(max=0.2)
        self.shift.data.clamp_(max=0.1)
        return functional.mse_loss(self.scale.exp() * self.layers(batch[0]) + self.shift, batch[1])


def trained_with_scalars(cluster=None, strategy="auto", **options):
    net = Scaled()
    make_trainer(cluster, strategy=strategy, gradient_clip_val=0.1, **options).fit(net, loader())
    return [value.tolist() for value in weights(net)]


def test_offloaded_scalars_may_be_changed_in_a_step():
    expected = trained_with_scalars(accelerator="cpu")
    strategy = FSDPStrategy(cpu_offload=True, state_dict_type="full")
    for found in in_ranks(trained_with_scalars, 1, strategy=strategy):
        for value, alone in zip(found, expected, strict=True):
            assert torch.allclose(torch.tensor(value), torch.tensor(alone), rtol=1e-5, atol=1e-7)


def trained_in_16_bits(cluster, **options):
    net = Net()
    strategy = FSDPStrategy(state_dict_type="full", **options)
    make_trainer(cluster, strategy=strategy, precision="bf16-mixed").fit(net, loader())
    return weights(net)


def test_offloaded_shards_are_computed_with_as_others_in_mixed_precision():
    (offloaded,), (others,) = (in_ranks(trained_in_16_bits, 1, cpu_offload=offload) for offload in (True, False))
    assert equal(offloaded, others)


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), *(nn.Linear(64, 64) for _ in range(24)), nn.Linear(64, 3))


class Peak(Callback):
    """Notes the most memory that the device has held when training starts."""

    def on_train_start(self, trainer, module) -> None:
        self.bytes = torch.simgpu.max_memory_allocated(trainer.strategy.root_device)


def peak_of_setup(cluster):
    net, peak = Wide(), Peak()
    strategy = FSDPStrategy(auto_wrap_policy={nn.Linear})
    full = sum(parameter.nbytes for parameter in net.parameters())
    make_trainer(cluster, strategy=strategy, callbacks=[peak], limit_train_batches=1).fit(net, loader())
    return peak.bytes / full


def test_a_sharded_module_is_never_whole_on_a_device():
    assert max(in_ranks(peak_of_setup)) < 0.7  # its half, and a layer


def first_mask(cluster, seed):
    trainer, net = make_trainer(cluster, strategy="ddp", limit_train_batches=1), Drawing()
    torch.manual_seed(seed)
    trainer.fit(net, loader())
    return net.drawn


class Drawing(Net):
    def training_step(self, batch, batch_idx):
        self.drawn = torch.rand(2, device=self.device).tolist()
        return super().training_step(batch, batch_idx)


def test_random_numbers_of_a_device_follow_the_seed():
    one, again, other = (in_ranks(first_mask, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


class Dropped(nn.Module):
    """Drops features, and keeps which."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, values):
        output = functional.dropout(values, 0.5)
        self.masks.append((output == 0).cpu().flatten().tolist())
        return output


class Stages(Net):
    """Has a layer with dropout in each of two stages."""

    def __init__(self):
        super().__init__()
        self.dropped = nn.ModuleList([Dropped(), Dropped()])
        first, second = self.dropped
        self.layers = nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 8), nn.Linear(8, 8), second, nn.Linear(8, 3))

    def configure_pipeline(self):
        return Pipeline(model=self.layers, loss=lambda output, batch: functional.mse_loss(output, batch[1]))


def masks_of_stages(cluster):
    net = Stages()
    trainer = make_trainer(cluster, strategy=MeshStrategy(pp=2), max_epochs=1)
    torch.rand(cluster.global_rank, device=trainer.strategy.root_device)  # so that the ranks begin with other states
    trainer.fit(net, loader())
    states = [torch.get_rng_state(), trainer.strategy.get_random_state()]
    return [mask for layer in net.dropped for mask in layer.masks], [state.tolist() for state in states]


def test_layers_of_stages_draw_from_states_of_their_own():
    (first, states), (second, others) = in_ranks(masks_of_stages)
    masks = first + second
    assert len(first) == len(second) > 0
    assert len(set(map(str, masks))) == len(masks)
    assert states == others


class FirstFrozen(Stages):
    def __init__(self):
        super().__init__()
        self.layers[:3].requires_grad_(False)


def trained_with_a_frozen_stage(cluster):
    net = FirstFrozen()
    strategy = MeshStrategy(pp=2, cpu_offload=True)
    make_trainer(cluster, strategy=strategy, precision="16-mixed", limit_train_batches=2, max_epochs=1).fit(
        net, loader()
    )
    return [str(parameter.device) for parameter in net.parameters()]


def test_stages_skip_steps_together_where_one_is_frozen_and_all_are_offloaded():
    assert in_ranks(trained_with_a_frozen_stage)


class Gathers(Net):
    def on_train_start(self):
        self.gathered = self.all_gather({"host": torch.full((2,), self.global_rank), "number": 0.5})


def values_of_host(cluster):
    net = Gathers()
    make_trainer(cluster, strategy="ddp", limit_train_batches=1).fit(net, loader())
    return {name: value.tolist() for name, value in net.gathered.items()}


def test_tensors_of_the_host_are_gathered_as_numbers_are():
    assert in_ranks(values_of_host) == [{"host": [[0, 0], [1, 1]], "number": [0.5, 0.5]}] * 2


# Failures


class Watched(ParallelStrategy):
    """Notes what waits for the device after an error, before communication is closed: collectives may never end."""

    waits: Any = ()
    waits_before: Any = ()

    def on_exception(self, exception):
        with synchronizations() as self.waits:
            super().on_exception(exception)

    def close_communication(self, *, aborts):
        self.waits_before = [*self.waits_before, *self.waits]
        self.waits = ()
        super().close_communication(aborts=aborts)


class WatchedFSDP(Watched, FSDPStrategy):
    pass


class WatchedDiLoCo(Watched, DiLoCoStrategy):
    pass


class Fails(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        raise ValueError("a step that fails")


def waits_after_an_error(cluster):
    found = []
    for strategy in (WatchedFSDP(), WatchedDiLoCo(inner="fsdp", groups=1)):
        with pytest.raises(ValueError, match="a step that fails"):
            make_trainer(cluster, strategy=strategy).fit(Fails(), loader())
        found.append([wait.cause for wait in strategy.waits_before])
    return found


def test_after_an_error_communication_is_closed_before_the_device_is_awaited():
    assert in_ranks(waits_after_an_error) == [[[], []]] * 2


# Numbers of the host, which a backend of the device cannot send


def numbers_of_ranks(cluster):
    built = build(strategy="ddp", accelerator="simulated_gpu", devices=cluster.world_size, plugins=[cluster])
    return OwnLoop(built).launch(_numbers_of_ranks)


def _numbers_of_ranks(loop):
    strategy, count = loop.strategy, torch.tensor([1.0 + loop.strategy.global_rank], requires_grad=True)
    gathered = strategy.all_gather(count, sync_grads=True)
    (gathered * torch.tensor([[2.0], [3.0]])).sum().backward()
    reduced = strategy.reduce(count.detach(), reduce_op="sum")
    return [tensor.device.type for tensor in (reduced, gathered)], reduced.item(), gathered.tolist(), count.grad.item()


def test_numbers_of_the_host_are_reduced_and_gathered():
    both = ["cpu", "cpu"], 3.0, [[1.0], [2.0]]
    assert in_ranks(numbers_of_ranks) == [(*both, 4.0), (*both, 6.0)]
