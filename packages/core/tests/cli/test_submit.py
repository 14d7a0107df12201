"""``dstrat submit``: jobs of TorchX that would be submitted, a local one that runs, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TRAIN = """
import os, sys
import torch
from dstrat import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
assert os.environ["COLOR"] == "red"
if trainer.global_rank == 1 and "--fail" in sys.argv:
    sys.exit(3)
data = torch.utils.data.TensorDataset(torch.rand(16, 4))
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=2))
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, {sys.argv[1:]}")
"""


def test_without_torchx_the_error_says_how_to_get_it(dstrat):
    done = dstrat("submit", "train.py")
    assert done.returncode == 2
    assert done.stderr == 'dstrat: dstrat submit needs torchx, which is not installed: pip install "dstrat[submit]"\n'


needs_torchx = pytest.mark.skipif(find_spec("torchx") is None, reason="needs the extra dstrat[submit]")


@pytest.fixture
def submit(tmp_path):
    """Run the command where there is a script; the other libraries' own warnings are not errors there."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*arguments):
        command = [sys.executable, "-m", "dstrat", "submit", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


@needs_torchx
def test_dry_run_for_slurm_prints_one_job_of_several_nodes(submit, tmp_path):
    options = ("--nodes=2", "--devices=4", "--gpus=4", "--max-retries=3", "--time=01:00:00", "--env=COLOR=red")
    done = submit("--scheduler=slurm", *options, "--dry-run", "train.py", "--lr", "0.1", "--devices=9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    (settings,) = [line.split() for line in done.stdout.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--time=01:00:00", "--ntasks-per-node=1", "--cpus-per-task=8"} <= {*settings}
    assert "--gpus-per-task=4" in settings
    assert "--mem" not in " ".join(settings)
    assert "export TORCHX_MAX_RETRIES=3" in done.stdout
    assert "COLOR=red" in done.stdout
    launch = f"{sys.executable} -m torch.distributed.run"
    (step,) = [line for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert " --cpus-per-task=8 " in step
    assert step.count(launch) == 1
    assert "--nnodes 2 --nproc_per_node 4" in step
    assert step.endswith("train.py --lr 0.1 --devices=9'")
    script = tmp_path / "job.sbatch"
    script.write_text(done.stdout)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@needs_torchx
def test_nodes_of_a_slurm_job_meet_at_the_first_one(submit, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(submit("--scheduler=slurm", "--nodes=2", "--dry-run", "train.py").stdout)
    (tmp_path / "bin").mkdir()
    # Stand-ins print what a node would run, after its shell has expanded it.
    programs = {
        "srun": 'while [ "$1" != bash ]; do shift; done; bash "$2" "${3/*torch.distributed.run/echo}"',
        "scontrol": '[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]"}
    done = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--rdzv_endpoint n3:29500 " in done.stdout


@needs_torchx
def test_slurm_gets_partition_and_resources(submit):
    options = ("--scheduler=slurm", "--partition=long", "--gres=gpu:a100:4", "--nodes=1", "--dry-run")
    done = submit(*options, "train.py")
    assert {"--partition=long", "--gres=gpu:a100:4", "--nodes=1"} <= {*done.stdout.split()}
    assert "gpus-per-task" not in done.stdout


@needs_torchx
@pytest.mark.skipif(find_spec("kubernetes") is None, reason="needs torchx[kubernetes]")
def test_dry_run_for_kubernetes_prints_a_manifest(submit):
    yaml = pytest.importorskip("yaml")
    options = ("--nodes=2", "--devices=4", "--gpus=4", "--memory=65536", "--option=queue=default", "--image=gpt:1")
    done = submit("--scheduler=kubernetes", *options, "--dry-run", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert (manifest["kind"], manifest["spec"]["queue"], len(manifest["spec"]["tasks"])) == ("Job", "default", 2)
    for task in manifest["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        assert container["image"] == "gpt:1"
        assert container["resources"]["limits"] == {"cpu": "8000m", "memory": "65536M", "nvidia.com/gpu": "4"}
        command = container["command"][-1]
        assert command.startswith("torchrun ")  # the image's own
        assert command.endswith("train.py --lr 0.1")


@needs_torchx
def test_dry_run_for_aws_batch_prints_a_job(submit):
    pytest.importorskip("boto3")
    pytest.importorskip("yaml")
    options = ("--scheduler=aws_batch", "--nodes=2", "--memory=4096", "--option=queue=large", "--image=gpt:1")
    done = submit(*options, "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "type: multinode" in done.stdout
    assert "numNodes: 2" in done.stdout


@needs_torchx
def test_local_job_trains_to_the_end_on_two_processes(submit):
    done = submit("--devices=2", "--env=COLOR=red", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: 4 steps, ['--lr', '0.1']" in done.stdout


@needs_torchx
def test_failure_of_a_local_job_is_one_of_the_command(submit):
    done = submit("--devices=2", "--env=COLOR=red", "train.py", "--fail")
    assert done.returncode == 1
    assert "has ended as FAILED" in done.stderr
    assert "exitcode  : 3" in done.stdout


@needs_torchx
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scheduler=pbs", "train.py"), "scheduler 'pbs' is not known to TorchX: choose one of aws_batch"),
        (("--scheduler=local_docker", "train.py"), "scheduler 'local_docker' starts containers: name the image"),
        (("--option=colour=red", "train.py"), "scheduler 'local_cwd' has no option 'colour': it has auto_set_"),
        (("absent.py",), "there is no script 'absent.py': name a file, relative to "),
        (("--env=COLOR", "train.py"), "Invalid value for '--env': 'COLOR' must be NAME=VALUE"),
        (("--gres=gpu:4", "train.py"), "--gres is for --scheduler slurm, and scheduler 'local_cwd' has other options"),
        (("--scheduler=slurm", "--gres=gpu:4", "--gpus=4", "train.py"), "--gres 'gpu:4' and --gpus 4 exclude each"),
        (("--nodes=0", "train.py"), "Invalid value for '--nodes': 0 is not in the range x>=1"),
    ],
)
def test_job_that_cannot_be_submitted_is_refused_with_what_is_possible(submit, arguments, message):
    done = submit(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@needs_torchx
def test_help_and_listing_of_commands_import_neither_torchx_nor_torch(tmp_path):
    program = "import sys\nfrom dstrat.cli.main import commands\ncommands(sys.argv[1:], standalone_mode=False)\n"
    program += "assert not {'torch', 'torchx'} & {*sys.modules}"
    for arguments in (["--help"], ["submit", "--help"]):
        subprocess.run([sys.executable, "-c", program, *arguments], cwd=Path(tmp_path), check=True, capture_output=True)
