"""Made-up distributions with fresh interpreters that see nothing else, and one process of a job."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

NEEDED = ("dstrat", "pluggy", "packaging", "click", "rich", "markdown_it", "mdurl", "pygments", "typing_extensions")

PRELUDE = """
import json, sys
from dstrat.errors import DstratError
from dstrat.plugins.catalog import get_catalog, refresh_catalog

def attempt(function, *args, **kwargs):
    try:
        result = function(*args, **kwargs)
    except DstratError as error:
        return f"{type(error).__name__}: {error}"
    return getattr(result, "full_alias", result)

def find(name, kind="strategy"):
    return attempt(get_catalog().find, kind, name)

def states():
    return {f"{p.distribution}:{p.entry_point}": p.state for p in get_catalog().plugins}

def reasons():
    return {p.distribution: p.reason for p in get_catalog().plugins}
"""

HEADER = """
from dstrat.plugins.component import Component, Tombstone
from dstrat.plugins.component import hookimpl
"""


def component(alias="acme", target="acme.strategy:Acme", kind="strategy", **facts) -> str:
    """The source text of a record."""
    return f"Component(**{ {'kind': kind, 'alias': alias, 'target': target, 'summary': 'for tests', **facts}!r})"


def hook(*records: str) -> str:
    """The source text of a plugin module that returns the records."""
    return f"{HEADER}\n@hookimpl\ndef dstrat_components():\n    return [{', '.join(records)}]\n"


class Site:
    """A folder with distributions, to be put on the path of a fresh interpreter."""

    component = staticmethod(component)
    hook = staticmethod(hook)

    def __init__(self, folder: Path, bare: Path) -> None:
        self.folder = folder
        self.bare = bare

    def add(self, name, *records, version="1.0", plugin=None, entry_points=None, group="dstrat.v1", **modules):
        """Install a distribution with a plugin module, and further modules by name."""
        package = name.replace("-", "_")
        plugin = hook(*records) if plugin is None else plugin
        for module, text in {"__init__": "", "plugin": plugin, **modules}.items():
            self.write(f"{package}/{module}.py", text)
        lines = [f"{key} = {value}" for key, value in (entry_points or [(name, f"{package}.plugin")])]
        info = f"{package}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this\n")
        self.write(f"{info}/entry_points.txt", "\n".join([f"[{group}]", *lines, ""]))

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(dedent(text))

    def ask(self, code: str, **environ: str):
        """Run statements in a fresh interpreter; return what the last of them, an expression, is worth."""
        *statements, expression = dedent(code).strip().split("\n")
        script = "\n".join([PRELUDE, *statements, f"print(json.dumps(({expression})))"])
        done = self.run("-c", script, **environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a fresh interpreter without site-packages."""
        path = os.pathsep.join([str(self.folder), str(self.bare)])
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


@pytest.fixture(scope="session")
def bare_packages(tmp_path_factory) -> Path:
    """The packages that listing needs, without metadata, and without torch."""
    folder = tmp_path_factory.mktemp("bare")
    for name in NEEDED:
        file = Path(importlib.util.find_spec(name).origin)
        found = file.parent if file.name == "__init__.py" else file
        (folder / found.name).symlink_to(found)
    return folder


@pytest.fixture
def site(tmp_path, bare_packages) -> Site:
    """An empty folder of distributions."""
    return Site(tmp_path, bare_packages)


@pytest.fixture
def quick_collections():
    """Leave what is there out of searches for garbage; a pytest that runs within the test makes several."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def process():
    """Makes the strategy as one process of several sees it."""
    from tests.one_of_many import OneOfMany

    return OneOfMany
