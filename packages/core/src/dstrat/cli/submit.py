"""``dstrat submit``: a script as a job of a scheduler, by TorchX."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrat.errors import MissingRequirementError, RequestError
from dstrat.plugins.known import pip_command

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.schedulers.slurm_scheduler import SlurmBatchRequest
    from torchx.specs import AppDef

_IN_THIS_ENVIRONMENT = ("local_cwd", "slurm")  # their nodes have this file system, and this Python
_WITHOUT_IMAGE = (*_IN_THIS_ENVIRONMENT, "ray")  # the others start containers
_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_CLIENTS = {"aws_batch": "boto3", "kubernetes": "kubernetes", "ray": "ray"}  # extras of TorchX, each with its module


def parse_pairs(_context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the names and values of options such as ``--env NAME=VALUE``."""
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise click.BadParameter(f"{pair!r} must be NAME=VALUE")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a script as a job of SLURM, Kubernetes, AWS Batch or Ray.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--scheduler", default="local", show_default=True, help="slurm, kubernetes, aws_batch, ray, local, ...")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Machines.")
@click.option("--devices", type=click.IntRange(1), default=1, show_default=True, help="Processes on each machine.")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each machine.")
@click.option("--cpus", type=click.IntRange(1), help="CPUs of each machine; by default two for each process.")
@click.option("--memory", type=click.IntRange(1), help="Memory of each machine in MiB; by default the scheduler's.")
@click.option("--time", help="SLURM: the longest time of the job, such as 12:00:00 or 2-00:00:00.")
@click.option("--partition", help="SLURM: the partition, or several with commas.")
@click.option("--gres", help="SLURM: resources of each machine in place of --gpus, such as gpu:a100:4.")
@click.option("--image", help="The image with the script and its requirements, for schedulers that start containers.")
@click.option("--name", help="The job's name; by default that of the script.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", callback=parse_pairs, help="A variable of its environment.")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", callback=parse_pairs, help="An option of the scheduler."
)
@click.option("--max-retries", type=click.IntRange(0), default=0, show_default=True, help="Restarts by the scheduler.")
@click.option("--wait", is_flag=True, help="Follow the output, and exit as the job does; local jobs always do.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted: a batch script, or a manifest.")
@click.pass_context
def submit(ctx: click.Context, /, scheduler: str, *, wait: bool, dry_run: bool, **job: Any) -> None:
    """Run SCRIPT with its ARGUMENTS as a job, on NODES machines with DEVICES processes on each.

    torchrun starts the processes of a machine.  The Trainer of the script has the same devices and num_nodes.  Options
    come before SCRIPT.  Schedulers, and the options of each, are those of TorchX: pip install "dstrat[submit]".
    """
    scheduler = {"local": "local_cwd"}.get(scheduler, scheduler)  # TorchX's name of it
    check_requirements(scheduler)
    from torchx.runner import get_runner
    from torchx.specs import InvalidRunConfigException

    with get_runner() as runner:
        check_request(runner, scheduler, job)
        flags = {name: job[name] for name in ("time", "partition") if job[name] is not None}  # options of TorchX too
        config = scheduler_config(runner, scheduler, {**job["options"], **flags})
        try:
            planned = runner.dryrun(make_job(scheduler, job), scheduler, config)
        except InvalidRunConfigException as error:
            raise RequestError(f"scheduler {scheduler!r} refuses the job: {error}; set it with --option") from error
        if scheduler == "slurm":
            request_nodes(planned.request, job)
        if dry_run:
            # A request with a script prints it after the command that submits it; alone it is a file for sbatch.
            script = getattr(planned.request, "materialize", None)
            click.echo(str(script() if script else planned).strip())
            return
        handle = runner.schedule(planned)
        click.echo(f"submitted {handle}", err=True)
        if wait or scheduler.startswith("local"):
            ctx.exit(follow(runner, handle))
        click.echo(f"To follow it: torchx log {handle}; to end it: torchx cancel {handle}", err=True)


def check_requirements(scheduler: str) -> None:
    """Check that TorchX is installed, with the client of the scheduler.

    Raises:
        MissingRequirementError: One of them is not.
    """
    if importlib.util.find_spec("torchx") is None:
        raise MissingRequirementError(
            f"dstrat submit needs torchx, which is not installed: {pip_command('dstrat[submit]')}"
        )
    client = _CLIENTS.get(scheduler)
    if client and importlib.util.find_spec(client) is None:
        raise MissingRequirementError(
            f"scheduler {scheduler!r} of TorchX needs {client}, which is not installed: "
            f"{pip_command(f'torchx[{scheduler}]')}"
        )


def check_request(runner: Runner, scheduler: str, job: dict[str, Any]) -> None:
    """Check that the job can run on the scheduler.

    Raises:
        RequestError: The scheduler is not known, or the job lacks an option that it needs.
    """
    available = runner.scheduler_backends()
    if scheduler not in available:
        names = ", ".join(sorted({"local", *available} - {"local_cwd"}))
        raise RequestError(f"scheduler {scheduler!r} is not known to TorchX: choose one of {names}")
    if job["image"] is None and scheduler not in _WITHOUT_IMAGE:
        raise RequestError(
            f"scheduler {scheduler!r} starts containers: name the image that has the script and its requirements with "
            "--image"
        )
    flags = [f"--{name}" for name in ("time", "partition", "gres") if job[name] is not None]
    if flags and scheduler != "slurm":
        raise RequestError(
            f"{flags[0]} is for --scheduler slurm, and scheduler {scheduler!r} has other options: leave it out, or see "
            f"torchx runopts {scheduler}"
        )
    if job["gres"] is not None and job["gpus"]:
        raise RequestError(f"--gres {job['gres']!r} and --gpus {job['gpus']} exclude each other: choose one of them")
    if job["memory"] is None and scheduler == "aws_batch":
        raise RequestError("scheduler 'aws_batch' starts no job without a size of its memory: set --memory, in MiB")
    if scheduler in _IN_THIS_ENVIRONMENT and not job["script"].is_file():
        raise RequestError(f"there is no script {str(job['script'])!r}: name a file, relative to {Path.cwd()}")


def scheduler_config(runner: Runner, scheduler: str, options: dict[str, str]) -> dict[str, Any]:
    """Return the scheduler's options, with those of a ``.torchxconfig`` in the working directory.

    Raises:
        RequestError: The scheduler has no such option.
    """
    from torchx.runner.config import apply

    possible = runner.scheduler_run_opts(scheduler)
    config: dict[str, Any] = {}
    # Each name is checked, since TorchX ignores options that a scheduler does not have.
    for name, value in options.items():
        if possible.get(name) is None:
            names = ", ".join(sorted(option for option, _ in possible))
            raise RequestError(f"scheduler {scheduler!r} has no option {name!r}: it has {names}")
        config.update(possible.cfg_from_str(f"{name}={value}"))
    apply(scheduler, config)  # adds those of the file that the command line does not set
    return config


def make_job(scheduler: str, job: dict[str, Any]) -> AppDef:
    """Return TorchX's job of the script: one torchrun for each machine."""
    from torchx.components.dist import ddp
    from torchx.specs import Resource, macros

    name = job["name"] or job["script"].stem
    app = ddp(
        *job["arguments"],
        script=str(job["script"]),
        image=job["image"] or "",
        name=f"/{name}",  # TorchX reads experiment/name
        j=f"{job['nodes']}x{job['devices']}",
        env=dict(job["env"]),
        max_retries=job["max_retries"],
    )
    (role,) = app.roles
    role.name = name  # SLURM's name of the job and of its files
    # TorchX's own default of 1 GiB is less than torch needs; 0 leaves it to the scheduler.
    role.resource = Resource(cpu=job["cpus"] or 2 * job["devices"], gpu=job["gpus"], memMB=job["memory"] or 0)
    if scheduler in _IN_THIS_ENVIRONMENT:
        # A virtual environment that is not activated has no torchrun on the path, and a node may have another one.
        shell, command = role.args
        this_python = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
        role.args = [shell, command.replace("torchrun", this_python, 1)]
    if scheduler == "slurm":
        # TorchX would make each machine a job of a heterogeneous one, which many sites refuse, and takes the first
        # machine from its variables.  Here srun starts the command once on each machine of one job.
        role.num_replicas = 1
        shell, command = role.args
        role.args = [shell, command.replace(f"$${{{macros.rank0_env}:=localhost}}", _FIRST_NODE)]
    return app


def request_nodes(request: SlurmBatchRequest, job: dict[str, Any]) -> None:
    """Set the options of a SLURM job that TorchX does not have."""
    (replica,) = request.replicas.values()
    replica.sbatch_opts["nodes"] = str(job["nodes"])
    if job["gres"] is not None:
        replica.sbatch_opts["gres"] = job["gres"]
    # Since SLURM 22.05 srun does not take it from sbatch, and would give each task one CPU.
    replica.srun_opts["cpus-per-task"] = str(replica.sbatch_opts["cpus-per-task"])


def follow(runner: Runner, handle: str) -> int:
    """Print the output of a job until its end, and return the exit code: 1 if it has failed."""
    from torchx.cli.cmd_log import get_logs
    from torchx.specs import AppState

    get_logs(sys.stdout, handle, regex=None, runner=runner, should_tail=True)
    status = runner.wait(handle, wait_interval=1)
    if status is None or status.state != AppState.SUCCEEDED:
        click.echo(f"dstrat: {handle} has ended as {status.state.name if status else 'UNKNOWN'}", err=True)
        return 1
    return 0
