"""One process on a mesh of XLA devices."""

import pytest
import torch
from packages.xla.tests.rank_fits import Block, CountsSteps, Net, SavesAt, Tied, begin, fit, loader
from tests.ranks import in_ranks

from dstrat import Callback, Trainer
from dstrat.errors import DeviceError, MisuseError, RequestError
from dstrat_xla import XLASPMDStrategy, runtime

BOTH = "accumulation and clipping"
WAYS = {"plain": {}, BOTH: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}


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


def uneven():
    """Return batches of 6, the last of 4, which no four devices divide evenly."""
    return torch.utils.data.DataLoader(loader().dataset, batch_size=6)


class NotesShards(Callback):
    """Notes how parameters and optimizer state are divided when training ends."""

    def __init__(self):
        self.shards = {}

    def on_train_end(self, trainer, module):
        optimizer = trainer.optimizers[0]
        for name, parameter in module.named_parameters():
            momentum = optimizer.state[parameter]["momentum_buffer"]
            self.shards[name] = runtime.sharding_of(parameter), runtime.sharding_of(momentum)


def fits_of_meshes(cluster, devices, names, way):
    """Fit on each mesh, in one process; return losses, and how parameters and their state are divided."""
    begin(devices)
    fits, shards = {}, {}
    for name in names:
        notes = NotesShards()
        fits[name, way] = fit(XLASPMDStrategy(**MESHES[name]), devices=devices, callbacks=[notes], **WAYS[way])
        shards[name] = notes.shards
    return fits, shards


def special_fits(cluster):
    begin(4)
    fits = {("sharded", "uneven"): fit(XLASPMDStrategy(**MESHES["sharded"]), devices=4, data=uneven())}
    fits["sharded", "tied"] = fit(XLASPMDStrategy(**MESHES["sharded"]), net := Tied(), devices=4)
    assert net.is_tied
    return fits


def check_losses(fits):
    special = {"uneven": {"data": uneven()}, "tied": {"net": Tied()}}
    expected = {
        way: fit("single_device", accelerator="cpu", **options)["losses"]
        for way, options in {**WAYS, **special}.items()
    }
    for (name, way), fitted in fits.items():
        assert len(fitted["losses"]) >= 20
        assert fitted["losses"] == pytest.approx(expected[way], rel=1e-5), (name, way)
        assert fitted["devices"] == ["cpu"]


# In one test, as each test would have another process, which starts the runtime.
def test_four_devices_give_the_losses_of_one_and_divide_state():
    ((fits, shards),) = in_ranks(fits_of_meshes, 1, devices=4, names=list(MESHES), way="plain")
    check_losses(fits)
    assert shards["data parallel"]["first.weight"][0] in {"", "{replicated}"}
    assert shards["sharded"]["first.weight"] == ("{devices=[4,1]0,1,2,3}",) * 2
    assert shards["sharded"]["blocks.0.down.weight"] == ("{devices=[1,4]0,1,2,3}",) * 2
    assert shards["sharded"]["last.bias"] == ("{replicated}",) * 2  # of two numbers
    split = "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert shards["tensor parallel"]["blocks.0.up.weight"] == (split,) * 2  # as annotate says
    assert shards["tensor parallel"]["first.weight"][0] == "{replicated}"


def test_accumulation_and_clipping_on_four_devices_give_the_losses_of_one():
    names = ["data parallel", "replicas of shards", "tensor parallel"]
    ((fits, _),) = in_ranks(fits_of_meshes, 1, devices=4, names=names, way=BOTH)
    check_losses(fits)


def test_uneven_batches_and_tied_weights_give_the_losses_of_one_device():
    (fits,) = in_ranks(special_fits, 1)
    check_losses(fits)


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_of_one_device_gives_the_losses_of_one(way):
    ((fits, _),) = in_ranks(fits_of_meshes, 1, devices=1, names=["data parallel"], way=way)
    check_losses(fits)


def counts_of_steps(cluster):
    begin(4)
    found = []
    for name, batches, options in (("data parallel", 108, {}), ("sharded by blocks", 28, WAYS[BOTH])):
        steps = CountsSteps()
        fit(XLASPMDStrategy(**MESHES[name]), devices=4, data=loader(batches), callbacks=[steps], **options)
        found.append(steps.more)
    return found


def test_each_step_is_one_graph_that_was_compiled_before():
    ((plain, accumulating),) = in_ranks(counts_of_steps, 1)
    assert plain == {"compiled": 0, "run": 100, "read": 0}
    assert accumulating == {"compiled": 0, "run": 10, "read": 0}


def stopped_and_resumed(cluster, folder):
    begin(4)
    run = {"devices": 4, "data": loader(8, shuffle=True)}
    found = {}
    for name in ("data parallel", "sharded"):
        path = f"{folder}/{name}"
        whole = fit(XLASPMDStrategy(**MESHES[name]), Net(dropout=0.2, adam=True), callbacks=[SavesAt(3, path)], **run)
        resumed = fit(XLASPMDStrategy(**MESHES[name]), Net(dropout=0.2, adam=True), resume=path, **run)
        found[name] = whole, resumed
    return found


def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path):
    (found,) = in_ranks(stopped_and_resumed, 1, folder=str(tmp_path))
    for name, (whole, resumed) in found.items():
        assert resumed["losses"] == whole["losses"][3:], name
        assert resumed["weights"] == whole["weights"], name


# Invalid use


@pytest.mark.without_torch_xla
@pytest.mark.parametrize("shape", [{}, {"data": 0}, {"data": -1, "fsdp": -1}, {1: 2}, {"data": 1.5}])
def test_a_mesh_without_sizes_or_names_is_an_error(shape):
    with pytest.raises(RequestError, match=r"mesh_shape .* is not possible: give sizes of axes by their names"):
        XLASPMDStrategy(mesh_shape=shape)


def test_a_mesh_that_leaves_devices_out_is_an_error():
    with pytest.raises(DeviceError, match=r"mesh_shape {'data': 3} does not fit 4 devices"):
        Trainer(strategy=XLASPMDStrategy(mesh_shape={"data": 3}), accelerator="xla", devices=4)


def devices_left_out(cluster):
    begin(4)
    with pytest.raises(DeviceError, match="drives all 4 devices of XLA's runtime, and devices=2 is requested"):
        Trainer(strategy="xla_spmd", accelerator="xla", devices=2)


def test_a_number_of_devices_that_the_runtime_does_not_have_is_an_error():
    in_ranks(devices_left_out, 1)


@pytest.mark.without_torch_xla
def test_there_is_no_mesh_before_a_run():
    with pytest.raises(MisuseError, match="has no mesh yet"):
        XLASPMDStrategy().device_mesh  # noqa: B018 - it raises


@pytest.mark.tpu
def test_losses_on_a_tpu_are_those_of_one_device():
    (fitted,) = in_ranks(losses_on_tpu, 1, devices=runtime.num_tpus())
    expected = fit("single_device", accelerator="cpu")["losses"]
    assert fitted == pytest.approx(expected, rel=1e-3)  # its products have fewer bits


def losses_on_tpu(cluster, devices):
    return fit(XLASPMDStrategy(mesh_shape={"fsdp": -1}), accelerator="tpu", devices=devices)["losses"]
