"""Checkpoints in the memory of several machines: what is copied, sent back, and refused."""

import os
import resource
import shutil

import pytest
import torch
import torch.distributed as dist
from tests.accelerators import make_mesh, process_group
from torch.distributed.tensor import Shard, distribute_tensor

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.memory_files import folder_in_memory, make_memory_root
from dstrat.checkpoint.portable.mirrored import MirroredCheckpointIO, search_memories
from dstrat.checkpoint.portable.newest import is_complete
from dstrat.errors import CheckpointError
from dstrat.launch.local import LocalLauncher

MEBIBYTE = 2**20
LARGE = (3, MEBIBYTE)  # 4 MiB for each of three ranks


def on_machines(function, folder, *args, ranks=(0, 1, 2)):
    """Run a function in forked ranks with the numbers of their machines; return what it returned in each rank."""

    def run():
        memory = folder / f"memory-{ranks[int(os.environ['RANK'])]}"
        memory.mkdir(exist_ok=True)
        os.environ["DSTRAT_MEMORY_DIR"] = str(memory)
        make_memory_root()
        with process_group(LocalEnvironment(os.environ)):
            results = [None] * len(ranks)
            dist.all_gather_object(results, function(folder, *args))
            return results

    return LocalLauncher(num_processes=len(ranks), start_method="fork").launch(run)


def path_of(folder):
    return folder_in_memory(folder) / "job" / "step=3.ckpt"


def values(fill):
    """Return a large tensor that each rank has a row of, and small ones."""
    mesh = make_mesh((dist.get_world_size(),))
    large = torch.arange(LARGE[0] * LARGE[1], dtype=torch.float32).view(LARGE) if fill else torch.zeros(LARGE)
    state = {
        "large": distribute_tensor(large, mesh, [Shard(0)]),
        "small": torch.arange(5.0) if fill else torch.zeros(5),
    }
    return {"state_dict": state, "global_step": 3, "per_rank": {"rank": dist.get_rank()}}


def save(folder):
    job = path_of(folder).parent
    job.mkdir(parents=True, exist_ok=True)
    (job / "owner").touch()
    PortableCheckpointIO().save_checkpoint(values(fill=True), path_of(folder))
    return sorted(path.name for path in path_of(folder).iterdir()), is_complete(path_of(folder))


def files_of(*ranks):
    of_ranks = [f"rank-{rank:05d}.{kind}" for rank in ranks for kind in ("json", "safetensors")]
    return sorted(["manifest.json", "state.json", "tensors.json", *of_ranks])


def test_each_machine_has_its_files_and_those_of_the_one_before(tmp_path):
    assert on_machines(save, tmp_path) == [(files_of(0, 2), False), (files_of(0, 1), False), (files_of(1, 2), False)]


def test_machines_may_have_different_numbers_of_ranks(tmp_path):
    assert on_machines(save, tmp_path, ranks=(0, 0, 1)) == [(files_of(0, 1, 2), True)] * 3


def test_ranks_that_share_a_memory_make_no_copies(tmp_path):
    results = on_machines(save, tmp_path, ranks=(0, 0, 0))
    assert results == [([*files_of(0, 1, 2)], True)] * 3


def load(folder):
    io = PortableCheckpointIO()
    machines = io.machines(io.ranks())
    (found,) = search_memories(machines, [str(folder)], None)
    assert (found.path, found.step) == (path_of(folder), 3)
    template = values(fill=False)
    loaded = MirroredCheckpointIO(machines).load_into(found.path, {"state_dict": template["state_dict"]})
    expected = values(fill=True)
    assert torch.equal(template["state_dict"]["large"].to_local(), expected["state_dict"]["large"].to_local())
    assert torch.equal(loaded["state_dict"]["small"], expected["state_dict"]["small"])
    assert loaded["per_rank"] == {"rank": dist.get_rank()}
    return {path.name: path.stat().st_blocks * 512 for path in found.path.glob("*.part")}


def test_a_replaced_machine_receives_only_what_it_reads(tmp_path):
    on_machines(save, tmp_path)
    shutil.rmtree(tmp_path / "memory-1")
    first, second, third = on_machines(load, tmp_path)
    # The small tensor is in one block of a file, which a machine without that file receives.
    assert second.pop("rank-00001.safetensors.part") in range(4 * MEBIBYTE, 5 * MEBIBYTE)
    assert all(size <= 2 * MEBIBYTE for received in (first, second, third) for size in received.values())
    assert on_machines(load, tmp_path)[0] == first


def test_ranks_on_other_machines_read_their_shards(tmp_path):
    on_machines(save, tmp_path)
    on_machines(load, tmp_path, ranks=(2, 0, 1))


def search(folder):
    io = PortableCheckpointIO()
    return [found.name for found in search_memories(io.machines(io.ranks()), [str(folder)], None)]


def save_of_two_jobs(folder):
    for job, step in (("slurm-7.aa", 3), ("other", 9)):
        path = folder_in_memory(folder) / job / f"step={step}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "owner").touch()
        PortableCheckpointIO().save_checkpoint({**values(fill=True), "global_step": step}, path)


def search_of_job(folder):
    io = PortableCheckpointIO()
    found = search_memories(io.machines(io.ranks()), [str(folder)], "slurm-7")
    return [(each.path.parent.name, each.step) for each in found]


def test_a_replaced_machine_brings_no_checkpoint_of_another_job(tmp_path):
    on_machines(save_of_two_jobs, tmp_path, ranks=(0, 1))  # each has all files, its own and copies
    (attempt,) = (tmp_path / "memory-1").glob("**/slurm-7.aa")
    shutil.rmtree(attempt)
    assert on_machines(search_of_job, tmp_path, ranks=(0, 1)) == [[("slurm-7.aa", 3)]] * 2


def test_without_two_neighbors_there_is_no_checkpoint(tmp_path):
    on_machines(save, tmp_path)
    for machine in (0, 1):
        shutil.rmtree(tmp_path / f"memory-{machine}")
    assert on_machines(search, tmp_path) == [[]] * 3


def test_a_save_that_not_all_machines_have_committed_is_not_taken(tmp_path):
    on_machines(save, tmp_path)
    for machine in (0, 1):
        (saved,) = (tmp_path / f"memory-{machine}").glob("**/step=3.ckpt")
        saved.rename(saved.with_name(".dstrat-0123.tmp"))
    assert on_machines(search, tmp_path) == [[]] * 3


def save_with_full_memory(folder):
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, resource.RLIM_INFINITY))
    checkpoint = {"per_rank": {"large": torch.zeros(MEBIBYTE if dist.get_rank() == 0 else 5)}}
    with pytest.raises(CheckpointError) as raised:
        PortableCheckpointIO().save_checkpoint(checkpoint, path_of(folder))
    return str(raised.value), list(path_of(folder).parent.iterdir())


def test_a_memory_without_room_for_the_copy_is_named(tmp_path):
    message = "rank 1 could not reserve memory for files of another machine: file too large"
    assert on_machines(save_with_full_memory, tmp_path, ranks=(0, 1)) == [(message, [])] * 2


def read_damaged(folder):
    io = PortableCheckpointIO()
    with pytest.raises(CheckpointError) as raised:
        MirroredCheckpointIO(io.machines(io.ranks())).load_checkpoint(path_of(folder))
    return str(raised.value)


def test_damaged_bytes_of_another_machine_are_refused(tmp_path):
    on_machines(save, tmp_path, ranks=(0, 1))
    shutil.rmtree(tmp_path / "memory-1")
    (file,) = (tmp_path / "memory-0").glob("**/step=3.ckpt/rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, second = on_machines(read_damaged, tmp_path, ranks=(0, 1))
    assert "is damaged: rank-00000.safetensors has wrong bytes between" in first
    assert "is damaged: rank-00000.safetensors.part has wrong bytes between" in second
