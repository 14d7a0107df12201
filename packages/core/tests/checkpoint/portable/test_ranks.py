"""Ranks that save together: every tensor once, any placements, any number of ranks when it is loaded."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.accelerators import make_mesh, process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError, RankFailedError
from dstrat.launch.local import LocalLauncher

SHAPE = (13, 6, 5)
LAYOUTS = {
    2: [((2,), [placement]) for placement in (Shard(0), Shard(1), Shard(2), Replicate())],
    3: [((3,), [Shard(0)]), ((3,), [Shard(2)])],
    4: [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(2), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Replicate()]),
        ((2, 2), [Replicate(), Replicate()]),
    ],
}


def run_in_ranks(function, *args, ranks=2):
    """Run a function in forked ranks with a process group; return what it returned in rank 0."""

    def run():
        with process_group(LocalEnvironment(os.environ)):
            return function(*args)

    return LocalLauncher(num_processes=ranks, start_method="fork").launch(run)


def whole():
    return torch.arange(13 * 6 * 5, dtype=torch.float32).reshape(SHAPE)


def distributed(tensor, layout):
    sizes, placements = layout
    return distribute_tensor(tensor, make_mesh(sizes), placements)


def save(path, layouts):
    tensors = {str(number): distributed(whole() + number, layout) for number, layout in enumerate(layouts)}
    checkpoint = {"epoch": 7, "state_dict": tensors, "plain": torch.arange(5), "per_rank": {"rank": dist.get_rank()}}
    PortableCheckpointIO().save_checkpoint(checkpoint, path)


def check(path, layouts, num_tensors):
    io = PortableCheckpointIO()
    for layout in layouts:
        names = [str(number) for number in range(num_tensors)]
        template = {"state_dict": {name: distributed(torch.zeros(SHAPE), layout) for name in names}}
        loaded = io.load_into(path, template)
        assert loaded["epoch"] == 7
        for name in names:
            assert isinstance(loaded["state_dict"][name], DTensor)
            assert torch.equal(loaded["state_dict"][name].full_tensor(), whole() + int(name)), (layout, name)


def check_all(*checkpoints):
    for path, layouts, num_tensors in checkpoints:
        check(path, layouts, num_tensors)


def test_tensors_of_any_placements_come_back_whole_and_move_between_placements_and_numbers_of_ranks(io, tmp_path):
    """In one test, as the checkpoints of each number of ranks are loaded by the others."""
    for ranks, layouts in LAYOUTS.items():
        path = tmp_path / str(ranks)
        run_in_ranks(save, path, layouts, ranks=ranks)
        loaded = io.load_checkpoint(path)
        for number in range(len(layouts)):
            assert torch.equal(loaded["state_dict"][str(number)], whole() + number)
        assert torch.equal(loaded["plain"], torch.arange(5))
        assert "per_rank" not in loaded
        assert [io.load_rank(path, rank) for rank in range(ranks)] == [{"rank": rank} for rank in range(ranks)]
    io.save_checkpoint({"epoch": 7, "state_dict": {"0": whole()}}, tmp_path / "1")
    for loading, saved in {4: (1, 2, 3, 4), 2: (4,), 3: (4,)}.items():
        checkpoints = [(tmp_path / str(ranks), LAYOUTS[loading], len(LAYOUTS.get(ranks, "1"))) for ranks in saved]
        run_in_ranks(check_all, *checkpoints, ranks=loading)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_tensor_is_written_once_and_all_ranks_write_about_as_much(tmp_path, ranks):
    def save_many():
        mesh = make_mesh((2, ranks // 2))
        tensors = {f"plain{number}": torch.randn(100, 100) for number in range(16)}
        tensors |= {f"same{n}": distribute_tensor(torch.randn(64, 64), mesh, [Replicate()] * 2) for n in range(16)}
        tensors |= {f"half{n}": distribute_tensor(torch.randn(64, 64), mesh, [Shard(0), Replicate()]) for n in range(8)}
        PortableCheckpointIO().save_checkpoint({"state_dict": tensors}, tmp_path / "c")

    run_in_ranks(save_many, ranks=ranks)
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
    total = 4 * (16 * 100 * 100 + 24 * 64 * 64)
    assert len(sizes) == ranks
    assert sum(sizes) < total + ranks * 5000
    assert max(sizes) < 1.3 * total / ranks


def test_ranks_that_hold_the_same_shards_take_turns(tmp_path):
    def save_many():
        mesh = make_mesh((4,))
        tensors = {f"same{number}": distribute_tensor(torch.randn(64, 64), mesh, [Replicate()]) for number in range(16)}
        PortableCheckpointIO().save_checkpoint(tensors, tmp_path / "c")

    run_in_ranks(save_many, ranks=4)
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 5 * 64 * 64 * 4


def test_one_large_tensor_is_written_by_all_ranks(io, tmp_path):
    weight = torch.arange(40 * 1024 * 1024, dtype=torch.float32).reshape(-1, 1024)  # 160 MiB

    run_in_ranks(lambda: PortableCheckpointIO().save_checkpoint({"w": weight}, tmp_path / "c"), ranks=2)
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
    assert max(sizes) < 0.51 * weight.nbytes
    assert torch.equal(io.load_checkpoint(tmp_path / "c")["w"], weight)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5), torch.nn.Linear(5, 3))


def sharded_model(kind):
    net = model()
    if kind == "fsdp":
        for layer in (net[0], net[2]):
            fully_shard(layer)
        return fully_shard(net)
    if kind == "hybrid":
        return fully_shard(net, mesh=make_mesh((2, 2), mesh_dim_names=("replicate", "shard")))
    mesh = make_mesh((2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["data"])


def trained(kind):
    net = sharded_model(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        torch.manual_seed(step)
        net(torch.randn(4, 7)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def states(net, optimizer):
    names = {parameter: name for name, parameter in net.named_parameters()}
    by_name = {names[parameter]: state for parameter, state in optimizer.state.items()}
    return {"state_dict": dict(net.state_dict()), "optimizer": by_name}


def full(tree):
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    return tree.full_tensor().cpu() if isinstance(tree, DTensor) else tree.clone().cpu()


def move(folder, kinds):
    """Save what a model of each kind has, then load all that was saved into each; return both."""
    trees = {name: states(*trained(kind)) for name, kind in kinds.items()}
    saved = {name: full(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        PortableCheckpointIO().save_checkpoint(tree, folder / name)
    loaded = {}
    for path in sorted(path for path in folder.iterdir() if path.name != "last"):
        for name, tree in trees.items():
            for tensor in [*tree["state_dict"].values(), *(t for s in tree["optimizer"].values() for t in s.values())]:
                tensor.detach().zero_()
            loaded[path.name, name] = full(PortableCheckpointIO().load_into(path, tree))
    return saved, loaded


def test_sharded_models_and_optimizers_move(tmp_path):
    """What two ranks save is loaded by four, and by two again what four have saved."""
    on_2 = {"fsdp on 2": "fsdp"}
    on_4 = {"fsdp on 4": "fsdp", "hybrid": "hybrid", "tensor parallel": "tensor"}
    (tmp_path / "both").mkdir()
    expected, loaded = run_in_ranks(move, tmp_path / "both", on_2, ranks=2)
    for kinds, ranks in ((on_4, 4), ({"fsdp on 2 again": "fsdp"}, 2)):
        more_expected, more_loaded = run_in_ranks(move, tmp_path / "both", kinds, ranks=ranks)
        expected, loaded = expected | more_expected, loaded | more_loaded
    assert len(loaded) == 1 + 4 * 3 + 5
    for (saved, _), tree in loaded.items():
        assert list(tree["state_dict"]) == list(model().state_dict())
        for parameter, tensor in expected[saved]["state_dict"].items():
            assert torch.equal(tree["state_dict"][parameter], tensor)
            for key, value in expected[saved]["optimizer"][parameter].items():
                assert torch.equal(tree["optimizer"][parameter][key], value)


def test_stages_of_a_pipeline_save_what_each_has(io, tmp_path):
    def save_stage():
        rank = dist.get_rank()
        state = {"common": torch.ones(3), f"stage{rank}.w": torch.full((4,), float(rank))}
        PortableCheckpointIO().save_checkpoint({"epoch": rank, "state_dict": state}, tmp_path / "c")

    run_in_ranks(save_stage, ranks=3)
    loaded = io.load_checkpoint(tmp_path / "c")
    assert loaded["epoch"] == 0
    assert set(loaded["state_dict"]) == {"common", "stage0.w", "stage1.w", "stage2.w"}
    assert all(torch.equal(loaded["state_dict"][f"stage{n}.w"], torch.full((4,), float(n))) for n in range(3))


def test_a_default_device_is_not_that_of_messages(io, tmp_path):
    def save_stage():
        with torch.device("meta"):
            state = {f"stage{dist.get_rank()}.w": torch.ones(4, device="cpu")}
            PortableCheckpointIO().save_checkpoint({"state_dict": state}, tmp_path / "c")

    run_in_ranks(save_stage)
    loaded = io.load_checkpoint(tmp_path / "c")["state_dict"]
    assert [loaded[f"stage{rank}.w"].tolist() for rank in range(2)] == [[1] * 4] * 2


def test_values_and_lists_beside_the_tensors_of_a_stage_are_saved(io, tmp_path):
    def save_stage():
        rank = dist.get_rank()
        entry = {"count": rank, "sides": [torch.full((4,), float(rank)), torch.ones(2), []], "none": None}
        state = {"common": {"count": 9, "w": torch.ones(3)}, f"stage{rank}": entry}
        PortableCheckpointIO().save_checkpoint({"optimizers": [{"state": state}], "epoch": 1}, tmp_path / "c")

    run_in_ranks(save_stage, ranks=3)
    loaded = io.load_checkpoint(tmp_path / "c")
    state = loaded["optimizers"][0]["state"]
    assert state.keys() == {"common", "stage0", "stage1", "stage2"}
    for rank in range(3):
        entry = state[f"stage{rank}"]
        assert (entry["count"], entry["sides"][2], entry["none"]) == (rank, [], None)
        assert torch.equal(entry["sides"][0], torch.full((4,), float(rank)))


def everyones_message(path, checkpoint_of):
    """What saving says on each rank, each in a file of its own."""
    try:
        PortableCheckpointIO().save_checkpoint(checkpoint_of(dist.get_rank()), path)
        message = "saved"
    except CheckpointError as error:
        message = str(error)
    (path.parent / f"message {dist.get_rank()}").write_text(message)


def messages(folder):
    return [path.read_text() for path in sorted(folder.glob("message *"))]


def test_what_one_rank_cannot_save_fails_on_all_and_names_it(tmp_path):
    def checkpoint_of(rank):
        return {"per_rank": {"hook": print if rank == 1 else None}}

    run_in_ranks(everyones_message, tmp_path / "c", checkpoint_of, ranks=3)
    told = messages(tmp_path)
    assert len(told) == 3
    assert len(set(told)) == 1
    assert told[0].startswith("rank 1 could not save its checkpoint: 'per_rank/1/hook' is a builtins.builtin_function")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["message 0", "message 1", "message 2"]


def test_partial_sums_are_refused(tmp_path):
    def checkpoint_of(rank):
        return {"w": DTensor.from_local(torch.ones(3), make_mesh((2,)), [Partial()])}

    run_in_ranks(everyones_message, tmp_path / "c", checkpoint_of)
    assert "so no process holds its values: redistribute it" in messages(tmp_path)[0]


def test_plain_tensors_that_differ_in_shape_are_refused_on_all_ranks(tmp_path):
    run_in_ranks(everyones_message, tmp_path / "c", lambda rank: {"w": torch.ones(3 + rank)})
    told = messages(tmp_path)
    assert told[0] == told[1]
    assert "tensor 'w' is float32 of shape (3,) on rank 0, and float32 of shape (4,) on rank 1" in told[0]


def test_a_rank_whose_disk_is_full_fails_all_and_leaves_nothing(tmp_path):
    def with_a_small_disk():
        import resource

        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        everyones_message(tmp_path / "c", lambda rank: {f"w{n}": torch.ones(1_000_000) for n in range(2)})

    run_in_ranks(with_a_small_disk)
    told = messages(tmp_path)
    assert told == [f"rank 1 could not write checkpoint {str(tmp_path / 'c')!r}: file too large"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["message 0", "message 1"]


@pytest.mark.parametrize("moment", range(6))
def test_a_rank_that_dies_while_saving_takes_no_checkpoint_with_it(io, tmp_path, moment):
    victim = moment % 2

    def save_until_killed():
        io = PortableCheckpointIO()
        rank = dist.get_rank()
        weight = torch.ones(500_000)
        io.save_checkpoint({"step": 0, "a": weight, "b": weight + 1}, tmp_path / "0")
        if rank == victim:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.004 * moment)
        for step in range(1, 10_000):
            io.save_checkpoint({"step": step, "a": weight * step, "b": weight + step}, tmp_path / str(step))

    with pytest.raises(RankFailedError, match=f"rank {victim}"):
        run_in_ranks(save_until_killed)
    for path in sorted(tmp_path.glob("[0-9]*")):
        loaded = io.load_checkpoint(path)
        assert loaded["step"] == int(path.name)
        assert torch.equal(loaded["a"], torch.full((500_000,), float(max(1, loaded["step"]))))
    io.save_checkpoint({}, tmp_path / "after")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("dimension", [0, 1])
def test_only_the_bytes_that_are_needed_are_read(tmp_path, dimension):
    rows = torch.arange(32 * 1024 * 1024, dtype=torch.float32).reshape(4, -1)  # 4 rows of 32 MiB
    PortableCheckpointIO().save_checkpoint({"w": rows}, tmp_path / "c")

    def bytes_read():
        with Path("/proc/self/io").open() as file:
            return int(dict(line.split(": ") for line in file)["rchar"])

    def load_my_part():
        template = {"w": distribute_tensor(torch.zeros_like(rows), make_mesh((4,)), [Shard(dimension)])}
        before = bytes_read()
        PortableCheckpointIO().load_into(tmp_path / "c", template)
        read = bytes_read() - before
        assert torch.equal(template["w"].to_local(), rows.chunk(4, dimension)[dist.get_rank()].to(template["w"].device))
        return read

    read = run_in_ranks(load_my_part, ranks=4)
    assert 32 * 1024 * 1024 <= read < 40 * 1024 * 1024


def test_the_manifest_names_every_rank(tmp_path):
    run_in_ranks(save, tmp_path / "c", LAYOUTS[2])
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())["manifest"]
    assert manifest["world_size"] == 2
    assert {"rank-00000.json", "rank-00001.json"} < set(manifest["files"])


def test_ranks_save_in_the_background_while_they_communicate(io, tmp_path):
    def train():
        saver = AsyncCheckpointIO(PortableCheckpointIO())
        weight = torch.zeros(300_000)
        for step in range(5):
            saver.save_checkpoint({"step": step, "w": weight, "v": weight + 1}, tmp_path / str(step))
            for _ in range(20):
                gradient = torch.ones(300_000)
                dist.all_reduce(gradient)
                weight += gradient
        saver.teardown()

    run_in_ranks(train)
    for step in range(5):
        loaded = io.load_checkpoint(tmp_path / str(step))
        assert torch.equal(loaded["w"], torch.full((300_000,), 40.0 * step))
        assert torch.equal(loaded["v"], loaded["w"] + 1)
