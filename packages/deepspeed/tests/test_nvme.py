"""Parameters and optimizer state in files: trained, saved and resumed like others, and nothing is left behind."""

import gc
import hashlib
import mmap
import os
import resource
import signal
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from compiled import FOLDER_VARIABLE, PARTS, folder, needs_compiled, use_compiled, why_not
from deepspeed_fit import Model, fit, loader, trainer_of
from torch import nn

from dstrat import Callback
from dstrat.errors import CheckpointError, RequestError
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.native_checkpoint import find_files
from dstrat_deepspeed.nvme import map_file, run_folder
from dstrat_deepspeed.runtime import _may_lock_any
from dstrat_deepspeed.validation import check_state_buffers

OPTIMIZER = {"offload_optimizer": True, "offload_optimizer_device": "nvme"}
PARAMETERS = {
    "offload_parameters": True,
    "offload_params_device": "nvme",
    "params_buffer_size": 600_000,
    "params_buffer_count": 2,  # fewer than there are parameters in files
    "max_in_cpu": 0,
}
WHERE = {
    "optimizer": OPTIMIZER | {"sub_group_size": 300_000},
    "parameters": PARAMETERS,
    "both": OPTIMIZER | PARAMETERS,
}
KINDS = {"optimizer": {"offload_optimizer"}, "float32params": {"offload_parameters"}}
TRAINING = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 2}


class Wide(Model):
    """A network with parameters of 2 MiB on each of two ranks, as those of less than one stay in memory."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            wide = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
            self.net = nn.Sequential(nn.Linear(6, 1024), nn.ReLU(), *wide, nn.Linear(1024, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(Callback):
    """Saves after the first batch of a step, and after the second; takes note of what is in files then."""

    saves_checkpoints = True

    def __init__(self, folder, files):
        self.folder, self.files, self.found = folder, Path(files), set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen in (3, 4):
            trainer.save_checkpoint(f"{self.folder}/{trainer.fit_loop.batches_seen}")
            self.found |= {path.parent.parent.name for path in self.files.rglob("*.swp")}


def strategy(files, options):
    return DeepSpeedStrategy(stage=3, nvme_path=str(files), **options)


def trained_saved_and_resumed(cluster, where, folder, files, alone):
    use_compiled("cpu_adam", "async_io")
    found = {}
    for name in where:
        options = WHERE[name]
        saves, module = Saves(f"{folder}/{name}", files), Wide()
        whole = fit(module, strategy(files, options), cluster, callbacks=[saves], **TRAINING)
        trainer = trainer_of(strategy(files, options), cluster)
        validated = trainer.validate(module, loader(2))[0]["val_loss"]
        resumed = [
            fit(module, strategy(files, options), cluster, ckpt_path=f"{folder}/{name}/{at}", **TRAINING)
            for at in (3, 4)
        ]
        moved = fit(Wide(), strategy(files, options), cluster, ckpt_path=alone, **TRAINING)
        found[name] = (whole, validated, resumed, moved, saves.found, locked())
    return found


def locked():
    """Return the KiB of memory that this process has locked, and still needs."""
    gc.collect()
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text("utf-8").splitlines()
        if line.startswith("VmLck")
    )


class TestWithWhatIsCompiled:
    pytestmark = needs_compiled("cpu_adam", "async_io")

    @pytest.mark.parametrize(
        "where", [["both"], pytest.param(["optimizer", "parameters"], marks=pytest.mark.slow)], ids=" and ".join
    )
    def test_it_trains_evaluates_goes_on_and_moves_like_any_other(self, ranks, tmp_path, capfd, where):
        files = tmp_path / "files"
        files.mkdir()
        saves = Saves(tmp_path / "alone", files)
        module = Wide()
        expected = fit(module, "single_device", callbacks=[saves], **TRAINING)
        value = trainer_of("single_device").validate(module, loader())[0]["val_loss"]
        arguments = {
            "where": where,
            "folder": str(tmp_path),
            "files": str(files),
            "alone": str(tmp_path / "alone" / "4"),
        }
        for found in ranks(trained_saved_and_resumed, **arguments):
            for name, (whole, validated, resumed, moved, in_files, locked_memory) in found.items():
                assert whole == pytest.approx(expected, rel=1e-5, abs=0), name
                assert validated == pytest.approx(value, rel=1e-5), name
                assert resumed == [whole[3:], whole[4:]], name
                assert moved == pytest.approx(expected[4:], rel=1e-5, abs=0), name
                assert in_files == {kind for kind, here in KINDS.items() if here & WHERE[name].keys()}
                assert locked_memory < 100_000  # of 4 runs
            assert list(files.iterdir()) == []
        for name, (whole, *_) in found.items():
            alone = fit(Wide(), "single_device", ckpt_path=tmp_path / name / "4", **TRAINING)
            assert alone == pytest.approx(whole[4:], rel=1e-5, abs=0), name
        assert capfd.readouterr().out == ""


def test_the_folder_of_a_run_is_its_own_and_goes_with_it_but_one_in_use_stays(tmp_path):
    with run_folder(str(tmp_path)) as first, run_folder(str(tmp_path)) as second:
        assert first != second
        assert {path.name for path in Path(first).iterdir()} == {"in-use"}
        assert {str(path) for path in tmp_path.iterdir()} == {first, second}
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed_by_the_next_and_nothing_else(ranks, tmp_path):
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "dstrat-something").mkdir()
    ranks(killed_with_files, 1, may_die={0}, path=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    with run_folder(str(tmp_path)) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"somebody's", "dstrat-something", Path(folder).name}


def killed_with_files(cluster, path):
    with run_folder(path) as folder:
        Path(folder, "1.tensor.swp").touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def little_memory_to_lock():
    """Allow this process to lock 64 KiB, as containers do."""
    user, limits = os.geteuid(), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, limits[1]))
    sysconfig.get_config_vars()  # read from files of Python's owner, and kept
    folder()  # imports what reads versions, for the same reason
    if user == 0:
        os.seteuid(65534)  # which takes the right to lock any amount
    yield
    os.seteuid(user)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_what_may_be_locked_is_known_whatever_the_program_is_called():
    name = Path("/proc/self/comm")
    before, allowed = name.read_bytes(), _may_lock_any()
    name.write_bytes(b"n\xf6tig \xff")
    try:
        assert _may_lock_any() is allowed
    finally:
        name.write_bytes(before)


def test_that_too_little_memory_may_be_locked_is_why_tests_with_files_are_skipped(little_memory_to_lock, monkeypatch):
    with tempfile.TemporaryDirectory() as kept:
        monkeypatch.setenv(FOLDER_VARIABLE, kept)
        folder().mkdir()
        for part in PARTS["async_io"]:
            (folder() / f"{part}.so").write_bytes(b"compiled")
            (folder() / f"{part}.sha256").write_text(hashlib.sha256(b"compiled").hexdigest(), "utf-8")
        if (reason := why_not("async_io")) and "to be compiled" in reason:
            pytest.skip(reason)
        assert "the test locks 32 MiB of memory in each rank, and 0 MiB are allowed" in str(reason)


def test_optimizer_state_in_files_that_needs_more_locked_memory_is_an_error(little_memory_to_lock):
    zero = {"offload_optimizer": {"device": "nvme"}, "sub_group_size": 500_000}
    groups = [{"params": [torch.zeros(1000, 1000), torch.zeros(1000), torch.zeros(300_001)]}]
    with pytest.raises(RequestError, match=r"locks 8 MiB .* and 0 MiB are allowed.* smaller sub_group_size"):
        check_state_buffers({"zero_optimization": zero}, groups, 2)  # 4 buffers of 500,000 elements
    zero["offload_optimizer"]["device"] = "cpu"
    check_state_buffers({"zero_optimization": zero}, groups, 2)


def test_deepspeeds_own_checkpoint_of_files_is_not_read_which_is_said(tmp_path):
    (tmp_path / "offloaded_tensors").mkdir()
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"as NVMe had them .*resume from the portable checkpoint beside it"):
        find_files(tmp_path)


def test_what_is_written_into_a_mapped_tensor_is_in_the_file_and_the_other_way_round(tmp_path):
    path = tmp_path / "1.swp"
    tensor = map_file(str(path), 1024, torch.float32)
    tensor.fill_(3)
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32), tensor)
    assert torch.equal(read_past_the_cache(path), tensor)
    with path.open("r+b") as file:
        file.write(torch.arange(4, dtype=torch.float32).numpy().tobytes())
    assert tensor[:5].tolist() == [0, 1, 2, 3, 3]


def read_past_the_cache(path):
    """Return what DeepSpeed, which reads so, would read."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:  # a file system without it
        file = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(-1, 4096)  # at the start of a page, as such reading demands
    os.readv(file, [memory])
    os.close(file)
    return torch.frombuffer(bytearray(memory[:]), dtype=torch.float32)
