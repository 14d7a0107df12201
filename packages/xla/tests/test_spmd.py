"""One process on a mesh of XLA devices."""

import pytest
import torch
from packages.xla.tests.rank_fits import Block, Net, SavesAt, begin, counts, fit, loader
from tests.ranks import in_ranks

from dstrat import Callback, Trainer
from dstrat.errors import DeviceError, MisuseError, RequestError
from dstrat_xla import XLASPMDStrategy, runtime

WAYS = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


def split_blocks(module, mesh):
    """Split the layers of each block over an axis, as for tensor parallel."""
    from torch_xla.distributed import spmd

    for block in module.blocks:
        spmd.mark_sharding(block.up.weight, mesh, ("tensor", None))
        spmd.mark_sharding(block.up.bias, mesh, ("tensor",))
        spmd.mark_sharding(block.down.weight, mesh, (None, "tensor"))


MESHES = {
    "data parallel": {},
    "sharded": {"mesh_shape": {"fsdp": -1}},
    "sharded by blocks": {"mesh_shape": {"fsdp": -1}, "auto_wrap_policy": [Block]},
    "replicas of shards": {"mesh_shape": {"data": 2, "fsdp": 2}},
    "tensor parallel": {"mesh_shape": {"data": -1, "tensor": 2}, "annotate": split_blocks},
}


@pytest.fixture(scope="module")
def expected():
    return {way: fit("single_device", accelerator="cpu", **options)["losses"] for way, options in WAYS.items()}


def losses_of_meshes(cluster, devices, names):
    begin(devices)
    return {
        (name, way): fit(XLASPMDStrategy(**MESHES[name]), devices=devices, **options)
        for name in names
        for way, options in WAYS.items()
    }


@pytest.mark.parametrize("name", MESHES)
def test_losses_are_those_of_one_device_on_four_devices(expected, name):
    (fitted,) = in_ranks(losses_of_meshes, 1, devices=4, names=[name])
    for (_, way), found in fitted.items():
        assert found["losses"] == pytest.approx(expected[way], rel=1e-5), way
        assert found["devices"] == ["cpu"]


def test_losses_are_those_of_one_device_on_a_mesh_of_one(expected):
    (fitted,) = in_ranks(losses_of_meshes, 1, devices=1, names=["data parallel", "sharded"])
    for (_, way), found in fitted.items():
        assert found["losses"] == pytest.approx(expected[way], rel=1e-5)


class LooksAtShards(Callback):
    """Notes how parameters and optimizer state are divided when training ends."""

    def __init__(self):
        self.found = {}

    def on_train_end(self, trainer, module):
        optimizer = trainer.optimizers[0]
        for name, parameter in module.named_parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            self.found[name] = runtime.sharding_of(parameter), runtime.sharding_of(moment)


def shards_of(cluster, name):
    begin(4)
    looks = LooksAtShards()
    fit(XLASPMDStrategy(**MESHES[name]), devices=4, data=loader(4), callbacks=[looks])
    return looks.found


def test_parameters_and_optimizer_state_are_divided_over_the_devices():
    (found,) = in_ranks(shards_of, 1, name="sharded")
    assert found["first.weight"] == ("{devices=[4,1]0,1,2,3}",) * 2
    assert found["blocks.0.down.weight"] == ("{devices=[1,4]0,1,2,3}",) * 2
    assert found["last.bias"] == ("{replicated}",) * 2  # of two numbers


def test_what_annotate_marks_is_divided_as_it_says():
    (found,) = in_ranks(shards_of, 1, name="tensor parallel")
    assert found["blocks.0.up.weight"][0] == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert found["first.weight"][0] == "{replicated}"


class Counts(Callback):
    """Notes what torch_xla has counted, after the first steps and at the end."""

    def __init__(self, warm_up):
        self.warm_up, self.warm, self.end = warm_up, None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.warm_up:
            self.warm = counts()

    def on_train_end(self, trainer, module):
        self.end = counts()


def counts_of_steps(cluster, name, options):
    begin(4)
    steps = Counts(warm_up=8)
    fit(XLASPMDStrategy(**MESHES[name]), devices=4, data=loader(108), callbacks=[steps], **options)
    return {what: steps.end[what] - steps.warm[what] for what in steps.end}


@pytest.mark.parametrize("name", ["data parallel", "sharded by blocks"])
@pytest.mark.parametrize(("options", "graphs"), [({}, 100), ({"accumulate_grad_batches": 2}, 50)])
def test_each_step_is_one_graph_that_was_compiled_before(name, options, graphs):
    (more,) = in_ranks(counts_of_steps, 1, name=name, options=options)
    assert more == {"compiled": 0, "run": graphs, "read": 0}


def stopped_and_resumed(cluster, name, folder):
    begin(4)
    path = f"{folder}/checkpoint"
    run = {"devices": 4, "data": loader(8, shuffle=True)}

    def strategy():
        return XLASPMDStrategy(**MESHES[name])

    whole = fit(strategy(), Net(dropout=0.2), callbacks=[SavesAt(3, path)], **run)
    resumed = fit(strategy(), Net(dropout=0.2), resume=path, **run)
    return whole, resumed


@pytest.mark.parametrize("name", ["data parallel", "sharded"])
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path, name):
    ((whole, resumed),) = in_ranks(stopped_and_resumed, 1, name=name, folder=str(tmp_path))
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["weights"] == whole["weights"]


def uneven(cluster):
    begin(4)
    data = torch.utils.data.DataLoader(loader().dataset, batch_size=6)  # of 160, so that the last has four
    return fit(XLASPMDStrategy(mesh_shape={"fsdp": -1}), devices=4, data=data)["losses"]


def test_batches_that_do_not_divide_evenly_count_the_same():
    data = torch.utils.data.DataLoader(loader().dataset, batch_size=6)
    expected = fit("single_device", accelerator="cpu", data=data)["losses"]
    (losses,) = in_ranks(uneven, 1)
    assert losses == pytest.approx(expected, rel=1e-5)


# Invalid use


@pytest.mark.without_torch_xla
@pytest.mark.parametrize("shape", [{}, {"data": 0}, {"data": -1, "fsdp": -1}, {1: 2}, {"data": 1.5}])
def test_a_mesh_without_sizes_or_names_is_an_error(shape):
    with pytest.raises(RequestError, match=r"mesh_shape .* is none: give sizes of axes by their names"):
        XLASPMDStrategy(mesh_shape=shape)


def test_a_mesh_that_leaves_devices_out_is_an_error():
    with pytest.raises(DeviceError, match=r"mesh_shape {'data': 3} does not fit 4 devices"):
        Trainer(strategy=XLASPMDStrategy(mesh_shape={"data": 3}), accelerator="xla", devices=4)


def devices_left_out(cluster):
    begin(4)
    with pytest.raises(DeviceError, match="drives all 4 devices of XLA's runtime, and devices=2 was asked for"):
        Trainer(strategy="xla_spmd", accelerator="xla", devices=2)


def test_a_number_of_devices_that_the_runtime_does_not_have_is_an_error():
    in_ranks(devices_left_out, 1)


@pytest.mark.without_torch_xla
def test_there_is_no_mesh_before_a_run():
    with pytest.raises(MisuseError, match="has no mesh yet"):
        XLASPMDStrategy().device_mesh  # noqa: B018 - it raises


@pytest.mark.tpu
def test_losses_on_a_tpu_are_those_of_one_device(expected):
    count = runtime.num_tpus()
    (fitted,) = in_ranks(losses_on_tpu, 1, devices=count)
    assert fitted == pytest.approx(expected["plain"], rel=1e-3)  # its products have fewer bits


def losses_on_tpu(cluster, devices):
    return fit(XLASPMDStrategy(mesh_shape={"fsdp": -1}), accelerator="tpu", devices=devices)["losses"]
