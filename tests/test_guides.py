"""The guides in docs: their programs run, their commands work, and the messages that they explain exist."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click import Context
from tests.warm_program import WarmProgram

import dstrat.errors
from dstrat import StrategyRegistry, callbacks, loggers, profilers, tuner
from dstrat.cli.main import commands as commands_of_dstrat
from dstrat.errors import DstratError
from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(?P<kind>\w*) ?(?P<rest>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    found = _FENCE.finditer((DOCS / page).read_text())
    return [Block(block["kind"], block["rest"].removeprefix("title=").strip('"'), block["text"]) for block in found]


def programs(page: str) -> list[str]:
    return [block.text for block in blocks(page) if block.kind == "python" and not block.title]


PAGES = sorted(path.name for path in DOCS.glob("*.md"))
PACKAGE = ("publish.md", "testing.md")
"""Pages whose blocks with a title are together the files of a package."""
NOTEBOOK = "tutorial-notebook.md"
"""The page whose programs are cells: tests/neighbours/test_notebook.py runs them in a kernel."""
OF_NEIGHBOURS = (NOTEBOOK, "tutorial-adapters.md")
"""Pages that tests/neighbours runs, beside the libraries that they use."""
TUTORIALS = [page for page in PAGES if page.startswith("tutorial-") and page not in OF_NEIGHBOURS]
"""Pages whose blocks with a title are files, and whose console blocks are commands with a part of what they print."""


def test_every_block_of_the_guides_is_of_a_kind_that_is_tested() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.kind in {"python", "toml", "bash", "console", "text", ""}, (page, block)
            if page == "clusters.md":  # whose scripts the tests of clusters run
                assert block.title, block
            elif block.title or block.kind in {"toml", "console"}:
                assert page in (*PACKAGE, *TUTORIALS, *OF_NEIGHBOURS), (page, block)


# Programs


@pytest.fixture
def registered() -> Iterator[None]:
    """Remove what a guide registers."""
    before = set(StrategyRegistry.available_strategies())
    yield
    for alias in set(StrategyRegistry.available_strategies()) - before:
        StrategyRegistry.remove(alias)


def run(*command: str, cwd: Path, **environ: str) -> str:
    env = {**os.environ, **environ}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_program_of_the_trainers_guide_runs_as_a_script_on_two_processes(tmp_path: Path) -> None:
    printed = run_forked(programs("trainer.md")[0], tmp_path)
    assert printed.count("'width': 32, 'lr': 0.01") == 1  # once for the job


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"\d+\.?\d*(e-\d+)?", "N", line.rstrip()) for line in text.splitlines()]


def test_the_first_program_of_readme_and_site_is_an_example_that_prints_what_they_show(tmp_path: Path) -> None:
    example = ROOT / "examples" / "first" / "train.py"
    assert programs("../README.md")[0] == programs("index.md")[0] == example.read_text()
    indented = re.findall(r"(?:^    \S.*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    plan, progress = (
        textwrap.dedent(block) for block in indented if " by popen " in block or "    trained 3 epochs" in block
    )
    assert {plan, progress} <= {block.text for block in blocks("index.md")}
    program = WarmProgram(shutil.copy(example, tmp_path))
    printed, bar = program.communicate(timeout=400)
    assert program.returncode == 0, bar
    assert plan in "".join(line.rstrip() + "\n" for line in printed.splitlines())
    shown = iter(without_numbers(bar))
    assert [line for line in without_numbers(progress) if line not in shown] == []  # in this order


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.variant] * (page != "tutorial-strategy.md")) for page in TUTORIALS]
)
def test_the_commands_of_a_tutorial_print_what_it_shows(page: str, tmp_path: Path) -> None:
    for module in LIBRARIES.get(page, ()):
        pytest.importorskip(module)
    check_commands(page, tmp_path)


def check_commands(page: str, folder: Path) -> None:
    for block in blocks(page):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        if block.kind == "console":
            lines = block.text.splitlines()
            commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            shown = [line for line in lines if not line.startswith("$ ")]
            printed = without_numbers(run_commands(commands, folder).replace(f"{folder}/", ""))
            remaining = iter(printed)
            assert [line for line in without_numbers("\n".join(shown)) if line not in remaining] == [], printed


LIBRARIES = {"tutorial-cluster.md": ("torchx",), "tutorial-strategy.md": ("copier",)}
"""Libraries of a tutorial that not every environment has."""


def run_commands(commands: list[str], folder: Path) -> str:
    """Run commands of a tutorial, those with a final & beside the next one; return what they print."""
    site = folder / "site"  # where pip installs
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
    modules = {"torchrun": ("-m", "torch.distributed.run"), "dstrat": ("-m", "dstrat"), "pip": PIP}
    text = ""
    running: list[WarmProgram | subprocess.Popen[str]] = []
    for command in commands:
        program, *arguments = command.removesuffix(" &").split()
        if program == "pip":
            arguments += ["--no-build-isolation", "--no-index", f"--target={site}"]
        running.append(
            WarmProgram(folder / arguments[0], *arguments[1:], environ=environ)
            if program == "python"
            else subprocess.Popen(
                (sys.executable, *modules[program], *arguments),
                cwd=folder,
                env={**os.environ, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        if not command.endswith(" &"):
            outputs = [started.communicate() for started in running]
            assert [started.returncode for started in running] == [0] * len(running), outputs
            text += "".join(printed + errors for printed, errors in outputs)
            running = []
    return text


PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")


def run_forked(program: str, folder: Path) -> str:
    """Run a program in forked processes, which start faster; that of the README is run again in each."""
    assert program.count('strategy="ddp"') == 1
    (folder / "program.py").write_text(program.replace('strategy="ddp"', 'strategy="ddp_fork"'))
    return WarmProgram(folder / "program.py").run()


def test_the_first_program_of_the_own_loops_guide_runs_as_a_script_on_two_processes(tmp_path: Path) -> None:
    assert run_forked(programs("own-loop.md")[0], tmp_path).count("epoch 3, step 48") == 1  # once for the job


def test_the_own_loop_of_the_readme_trains_and_saves(tmp_path: Path) -> None:
    (program,) = (text for text in programs("../README.md") if "OwnLoop" in text)
    run_forked(program, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("epoch-*")) == ["epoch-1", "epoch-2"]


@pytest.mark.slow
def test_the_programs_before_and_after_a_move_have_the_loss_of_the_page(tmp_path: Path) -> None:
    """Those of Fabric and Accelerate printed it where both were installed."""
    (loss,) = set(re.findall(r"loss \d\.\d+", (DOCS / "coming-from.md").read_text()))
    assert run_forked(programs("coming-from.md")[0], tmp_path).count(loss) == 1
    (before,) = (block.text for block in blocks("coming-from.md") if "init_process_group(" in block.text)
    (tmp_path / "before.py").write_text(before)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "before.py")
    environ = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        printed = run(*torchrun, cwd=tmp_path, **environ)
    except AssertionError as error:
        # On a busy machine a process of torch itself aborts now and then while it ends, and takes the others with it.
        if "terminate called without an active exception" not in str(error):
            raise
        printed = run(*torchrun, cwd=tmp_path, **environ)
    assert loss in printed


def test_the_program_of_the_command_lines_guide_trains_by_its_file_and_prints_its_message(tmp_path: Path) -> None:
    program, _ = programs("command-line.md")
    (text,) = (block.text for block in blocks("command-line.md") if block.text.startswith("trainer:"))
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.yaml").write_text(text.replace("strategy: ddp", "strategy: ddp_fork"))  # which starts faster
    options = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
    WarmProgram(tmp_path / "train.py", "fit", "--config=run.yaml", *options).run()
    assert "width: 16" in (tmp_path / "dstrat_logs" / "version_0" / "config.yaml").read_text()
    messages = next(block.text for block in blocks("command-line.md") if "no option" in block.text).splitlines()
    for option, message in zip(("--trainer.max_epoch=3", "--model.width=wide"), messages, strict=False):
        wrong = WarmProgram(tmp_path / "train.py", "fit", option)
        assert wrong.communicate()[1].splitlines() == [message]
        assert wrong.returncode == 2


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page) and page != NOTEBOOK])
def test_the_programs_of_a_guide_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    if page in ("gallery.md", "logging.md"):
        pytest.importorskip("torchmetrics")
    if page == "hydra.md":
        pytest.importorskip("hydra", reason="the session neighbours runs it")
    if page == "gallery.md":
        pytest.importorskip("tensorboard")
        pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide", **given(page)}
    for number, program in enumerate(programs(page)):
        shorter = re.sub(r"loader\((2048|512)", "loader(64", program)  # of gallery.md, which trains dozens of times
        exec(compile(shorter, f"{page}, program {number}", "exec"), names)


def given(page: str) -> dict[str, Any]:
    """Return what a page takes for granted."""
    if page != "checkpoint-format.md":
        return {}
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

    return {
        "torch": torch,
        "model": torch.nn.Linear(2, 2),
        "path": Path("saved"),
        "PortableCheckpointIO": PortableCheckpointIO,
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of the guide, as pip would have installed it."""
    folder = tmp_path_factory.mktemp("package")
    for block in (block for page in PACKAGE for block in blocks(page) if block.title):
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(block.text)
    project = (folder / "pyproject.toml").read_text()
    (point,) = re.findall(r'dstrat\.v1"\]\n(\w+ = ".*")', project)
    metadata = folder / "acme_signsgd-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-signsgd\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[dstrat.v1]\n" + point.replace('"', "") + "\n")
    return folder


def commands() -> list[str]:
    return [block.text for page in PACKAGE for block in blocks(page) if block.kind == "console"]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_a_guide_know_its_package(command: str, package: Path) -> None:
    prompt, program, *arguments = command.split()
    assert (prompt, program) == ("$", "dstrat")
    script = package / "main.py"
    script.write_text("from dstrat.cli.main import main; main()")
    assert "acme-signsgd 0.1.0" in WarmProgram(script, *arguments).run()


def test_the_package_of_a_guide_trains(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import dstrat, torch\n"
        "def train(loop):\n"
        "    net = torch.nn.Linear(2, 1)\n"
        "    loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5))\n"
        "    loop.backward(loop.compute(net, torch.ones(1, 2)).sum())\n"
        "    before = net.bias.item()\n"
        "    loop.step()\n"
        "    return net.bias.item() - before\n"
        "if __name__ == '__main__':\n"
        "    import acme_signsgd.strategy\n"
        "    strategy = acme_signsgd.strategy.SignSGDStrategy(start_method='fork')\n"
        "    print(dstrat.OwnLoop(dstrat.build(strategy=strategy, accelerator='cpu', devices=2)).launch(train))\n"
    )
    (package / "program.py").write_text(program)
    monkeypatch.syspath_prepend(str(package))
    change = WarmProgram(package / "program.py").run()
    assert float(change) == pytest.approx(-0.5)


@pytest.mark.slow
def test_the_package_of_a_guide_passes_standard_tests_of_its_plugin(package: Path) -> None:
    pytest_of_package = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "TestPlugin")
    printed = run(*pytest_of_package, cwd=package, PYTHONPATH=str(package))
    assert " passed" in printed


# Messages

VALUE = "\0"


def own_text(part: ast.AST) -> str:
    """Return the text of a part of a message, with VALUE for each value, such as where a logger puts one."""
    is_text = isinstance(part, ast.Constant) and type(part.value) is str
    return re.sub("%[sdr]", VALUE, part.value) if is_text else VALUE


@cache
def texts() -> list[list[str]]:
    """Return what is no value of each sentence, or part of one, in the sources."""
    found = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            own = "".join(map(own_text, parts)).split(VALUE)
            if sum(map(len, own)) >= 8 and any(" " in text for text in own):
                found.append(own)
    return found


def places(own: list[str], message: str) -> set[int]:
    """Return where the texts stand one after the other in a message; nothing where one of them does not."""
    found: set[int] = set()
    end = 0
    for text in own:
        start = message.find(text, end)
        if start < 0:
            return set()
        end = start + len(text)
        found.update(range(start, end))
    return found


def share_from_sources(message: str) -> float:
    """Return which share of a message, without the values that are shown as ..., stands in the sources."""
    known = set().union(*(places(own, message) for own in texts()))
    return len(known) / len(message.replace("...", ""))


def explained() -> list[str]:
    return [" ".join(block.text.split("\n")).strip() for block in blocks("troubleshooting.md") if block.kind == "text"]


@pytest.mark.slow
def test_a_message_that_is_explained_is_one_that_the_code_can_raise() -> None:
    shares = {message: share_from_sources(message) for message in explained()}
    assert shares
    assert {message: share for message, share in shares.items() if share <= 0.4} == {}

    of_nobody = "Nobody wrote that sentence: elephants refuse purple umbrellas whenever thunder interrupts breakfast"
    assert share_from_sources(of_nobody) < 0.2


def test_every_class_of_errors_is_explained() -> None:
    headings = set(re.findall(r"^###? (\w+Error)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    values = vars(dstrat.errors).items()
    classes = {name for name, value in values if isinstance(value, type) and issubclass(value, DstratError)}
    assert headings == classes - {DstratError.__name__, "CatalogError"}


def test_the_aliases_that_are_recommended_are_installed() -> None:
    page = (DOCS / "choose.md").read_text()
    first_table = page.split("## ")[0]
    recommended = {alias for line in first_table.splitlines() for alias in re.findall("`([a-z0-9_]+)`", line)}
    assert recommended - {"auto"} <= {name for offer in get_catalog().offers("strategy") for name in offer.names}
    assert len(recommended) > 8


@pytest.mark.skipif(find_spec("torchx") is None, reason="needs the extra dstrat[submit]")
@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_submitted_jobs_of_the_guide_are_possible(tmp_path: Path, scheduler: str) -> None:
    if scheduler == "kubernetes":
        pytest.importorskip("kubernetes")
    (script,) = (block.text for block in blocks("clusters.md") if block.title == "submit.sh")
    (command,) = (line for line in script.splitlines() if f"--scheduler {scheduler} " in line)
    assert "--dry-run" in command
    (tmp_path / "train.py").touch()
    assert "train.py 4 2 1" in run(sys.executable, "-m", *command.split(), cwd=tmp_path)


# The site


def test_the_diagrams_are_those_that_their_script_draws() -> None:
    script = runpy.run_path(str(DOCS / "images" / "diagrams.py"))
    for name, draw in script["DIAGRAMS"].items():
        for theme in ("light", "dark"):
            assert (DOCS / "images" / f"{name}-{theme}.svg").read_text() == draw(script[theme.upper()])


def test_each_row_of_the_table_of_what_is_known_leads_to_a_picture() -> None:
    rows = re.findall(r"^\| \[.*?\]\(gallery\.md#([\w-]+)\)", (DOCS / "coming-from.md").read_text(), re.MULTILINE)
    sections = (DOCS / "gallery.md").read_text().split("\n### ")[1:]
    shown = {}
    for section in sections:
        pictures = re.findall(r"^!\[.+\]\((.+?)(?:#\S+)?\)$", section, re.MULTILINE)
        shown[section.partition("\n")[0].lower().replace(" ", "-")] = pictures
    assert sorted(rows) == sorted(shown)
    assert [section for section, pictures in shown.items() if not pictures] == []
    drawn = sorted((DOCS / "images" / "gallery").iterdir())
    assert {path.name for path in drawn} <= {Path(picture).name for pictures in shown.values() for picture in pictures}
    for picture in drawn:
        text = re.sub("<[^>]*>", "", picture.read_text())
        assert picture.stat().st_size < 30_000, picture
        assert re.findall(r"/(?:home|root|tmp|work|usr)\b|site-packages", text) == [], picture


def test_tables_of_packages_have_every_package() -> None:
    packages = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    names = ["dstrat" if package == "core" else f"dstrat-{package}" for package in packages]
    for page in (ROOT / "README.md", DOCS / "installation.md"):
        table = "".join(line for line in page.read_text().splitlines() if line.startswith("|"))
        assert [name for name in names if not re.search(rf"\b{name}\b(?!-)", table)] == [], page


def test_the_reference_has_every_command_and_every_class_of_training() -> None:
    shown = (DOCS / "commands.md").read_text()
    assert [
        name for name in commands_of_dstrat.list_commands(Context(commands_of_dstrat)) if f'"dstrat {name}' not in shown
    ] == []
    classes = {name for module in (callbacks, loggers, profilers, tuner) for name in module.__all__}
    assert classes - set(re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)) == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1].split("theme:")[0]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == PAGES


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), "README.md"])
def test_links_between_the_guides_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link
