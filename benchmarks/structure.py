"""Size and language of the source, and the length of its hot paths, for comparisons before and after a restructuring.

``python benchmarks/structure.py`` measures the checkout that it is in and prints one row for each figure.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma)[^-]*")  # what follows a dash is a reason
RELATIVE = re.compile(r"\b(what|whatever|whose|of which)\b", re.IGNORECASE)
CLAUSE = re.compile(r"(what|how|where|when|whether|who|whose|which|why)\b", re.IGNORECASE)


def modules(package: str = "*") -> dict[Path, str]:
    """Return the text of each module of a package's source, without templates that users get a copy of."""
    paths = sorted(PACKAGES.glob(f"{package}/src/**/*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths if "template" not in path.parts}


def imports(tree: ast.AST) -> Iterator[ast.stmt]:
    """Give every import statement of a module."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def comments(text: str) -> int:
    """Return the number of lines with a comment that is for people, not only for a linter or a type checker."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and DIRECTIVE.fullmatch(token.string) is None for token in tokens)


def docstrings(tree: ast.AST) -> str:
    """Return all docstrings of a module, joined."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))


def lines_of_code(text: str) -> int:
    """Return the number of lines that are neither empty, nor a comment, nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in documented for n, line in lines)


def size() -> dict[str, Any]:
    """Return the figures of the source text."""
    texts = modules()
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lengths = {path: len(text.splitlines()) for path, text in texts.items()}
    titles = [ast.get_docstring(tree) or "" for tree in trees.values()]
    documentation = "\n".join(map(docstrings, trees.values()))
    code = sum(map(lines_of_code, texts.values()))
    imported = sum((n.end_lineno or n.lineno) - n.lineno + 1 for tree in trees.values() for n in imports(tree))
    deepspeed = [len(text.splitlines()) for text in modules("deepspeed").values()]
    tests = [path for path in PACKAGES.parent.rglob("test*/**/*.py") if ".nox" not in path.parts]
    return {
        "modules": len(texts),
        "modules of the core": len(modules("core")),
        "median module, lines": statistics.median(lengths.values()),
        "source lines": sum(lengths.values()),
        "lines of code": code,
        "import lines per 100 lines of code": round(100 * imported / code, 1),
        "comments per 100 lines of code": round(100 * sum(map(comments, texts.values())) / code, 1),
        "'what', 'whose', 'of which' per 1,000 words of docstrings": round(
            1000 * len(RELATIVE.findall(documentation)) / len(re.findall(r"\w+", documentation)), 1
        ),
        "module docstrings that begin with a clause, %": round(
            100 * sum(bool(CLAUSE.match(text)) for text in titles) / len(texts), 1
        ),
        "deepspeed modules": len(deepspeed),
        "deepspeed lines": sum(deepspeed),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
    }


def calls(function: Callable[[], Any]) -> tuple[int, int, int]:
    """Return how many functions and files of ours a call passes through, and how many calls of any Python function."""
    passed: set[tuple[str, str]] = set()
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if f"{PACKAGES}/" in frame.f_code.co_filename and not frame.f_code.co_name.startswith("<"):
                passed.add((frame.f_code.co_filename, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(passed), len({file for file, _ in passed}), count


def paths() -> dict[str, Any]:
    """Return the lengths of making a Trainer, of a save and of a load; each was done once before it is measured."""
    import torch

    import dstrat

    class Net(dstrat.TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def make() -> dstrat.Trainer:
        return dstrat.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    make()
    found: dict[str, Any] = {}
    found["functions passed by Trainer(strategy='ddp')"], found["files passed by it"], _ = calls(make)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer, net = dstrat.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet), Net()
        trainer.fit(net, loader)
        trainer.save_checkpoint(Path(folder) / "first")
        _, found["files passed by a save"], found["function calls of a save"] = calls(
            lambda: trainer.save_checkpoint(Path(folder) / "second")
        )
    return found


if __name__ == "__main__":
    for name, value in {**size(), **paths()}.items():
        print(f"{name:60} {value:>10,}")
