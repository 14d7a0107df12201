"""Size and language of the source, and the length of its hot paths, for comparisons before and after a restructuring.

``python benchmarks/structure.py`` measures the checkout that it is in and prints one row for each figure.  With
``--functions`` it prints the functions that a Trainer and a save pass instead, by file, with the number of calls.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma)[^-]*")  # what follows a dash is a reason
RELATIVE = re.compile(r"\b(what|whatever|whose|of which)\b", re.IGNORECASE)
NOQA = re.compile(r"#\s*noqa\b")
# Units of training/, top to bottom: an import from a later to an earlier one is upward.
TRAINING = (
    *("trainer", "execution", "elastic", "results", "properties", "evaluation_results", "callbacks", "run_recorder"),
    *("checkpoint", "contexts", "anomaly", "run", "run_beginning", "profilers", "loops", "hooks", "metrics", "loggers"),
    *("arguments", "settings", "module", "notebook"),
)
HOLDERS = ("Trainer", "TrainerProperties", "Run", "FitLoop", "Position", "AutomaticOptimization")
JOB_MODULES = ("parallel/process_group.py", "parallel/job.py", "launch/external.py", "launch/progress.py")
STATE_METHODS = {
    *("module_state_dict", "load_module_state_dict", "optimizer_state", "load_optimizer_state"),
    *("sharded_module_state", "load_sharded_module_state", "sharded_optimizer_state", "optimizer_template"),
    "load_sharded_optimizer_state",
}
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


def attributes(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Return the attributes that a class sets by itself, and its methods and properties."""
    own = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    own |= {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    return own, {n.name for n in node.body if isinstance(n, ast.FunctionDef)} - own


def training_imports() -> tuple[int, int]:
    """Return how many units of ``training/`` import another one, and how many of these imports are upward."""
    folder = PACKAGES / "core/src/dstrat/training"
    edges = set()
    for path in folder.rglob("*.py"):
        unit = path.relative_to(folder).with_suffix("").parts[0]
        for node in imports(ast.parse(path.read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            other = module.removeprefix("dstrat.training.").partition(".")[0]
            if module.startswith("dstrat.training.") and other != unit:
                edges.add((unit, other))
    order = {unit: index for index, unit in enumerate(TRAINING)}
    return len(edges), sum(order.get(one, 0) > order.get(other, 0) for one, other in edges)


def state() -> dict[str, Any]:
    """Return the figures of the state: who holds that of a run and of a job, and who gets the whole of it."""
    core = modules("core")
    root = PACKAGES / "core/src/dstrat"
    trees = {path: ast.parse(text) for path, text in core.items()}
    classes = {n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    found: dict[str, Any] = {}
    for name in HOLDERS:
        if name in classes:
            own, methods = attributes(classes[name])
            found[f"{name}: attributes of its own"] = len(own)
            found[f"{name}: attributes and members"] = len(own | methods)
    found["modules that import Trainer for annotations"] = sum(map(_annotates_trainer, trees.values()))
    found["imports between units of training/"], found["upward imports among these"] = training_imports()
    found["module-level lists, dicts and counters of a job"] = sum(
        isinstance(n, ast.Assign | ast.AnnAssign)
        and (
            isinstance(n.value, ast.List | ast.Dict)
            or (isinstance(n.value, ast.Call) and ast.unparse(n.value.func) == "itertools.count")
        )
        for name in JOB_MODULES
        if root / name in trees
        for n in trees[root / name].body
    )
    found["calls of as_path in the core"] = sum(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "as_path"
        for tree in trees.values()
        for n in ast.walk(tree)
    )
    families = [ast.parse(text) for path, text in modules().items() if path not in core]
    found["overrides of the nine state methods in the families"] = sum(
        isinstance(n, ast.FunctionDef) and n.name in STATE_METHODS for tree in families for n in ast.walk(tree)
    )
    functions = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    code = sum(map(lines_of_code, core.values()))
    found["code lines per function, core"] = round(code / len(functions), 1)
    everything = "\n".join(modules().values())
    found["noqa per 1,000 lines"] = round(1000 * len(NOQA.findall(everything)) / len(everything.splitlines()), 1)
    return found


def _annotates_trainer(tree: ast.Module) -> bool:
    """Return whether a module imports Trainer under TYPE_CHECKING, and does not export it."""
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return any(
        isinstance(n, ast.ImportFrom)
        and n.module == "dstrat.training.trainer"
        and "Trainer" in map(ast.unparse, n.names)
        for block in blocks
        for n in imports(block)
    )


def calls(function: Callable[[], Any]) -> tuple[Counter[tuple[str, str]], int]:
    """Return the calls of each function of ours in a call, by file and name, and the calls of any function in it."""
    passed: Counter[tuple[str, str]] = Counter()
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
            file = frame.f_code.co_filename
            if f"{PACKAGES}/" in file and not frame.f_code.co_name.startswith("<"):
                file = file.partition(f"{PACKAGES}/")[2].partition("/src/")[2]
                passed[file, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return passed, count


def paths() -> tuple[dict[str, Any], dict[str, Counter[tuple[str, str]]]]:
    """Return the lengths of making a Trainer, of a save and of a step, and the functions that the first two pass.

    Each was done once before it is measured.
    """
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
    made, _ = calls(make)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer, net = dstrat.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet), Net()
        trainer.fit(net, loader)
        trainer.save_checkpoint(Path(folder) / "first")
        saved, all_calls = calls(lambda: trainer.save_checkpoint(Path(folder) / "second"))
    found = {
        "functions passed by Trainer(strategy='ddp')": len(made),
        "files passed by it": len({file for file, _ in made}),
        "calls of ours in it": made.total(),
        "functions passed by a save": len(saved),
        "files passed by a save": len({file for file, _ in saved}),
        "calls of ours in a save": saved.total(),
        "function calls of a save": all_calls,
        "calls of ours in a further step": _calls_of_a_step(dstrat, net, loader, quiet),
    }
    return found, {"Trainer(strategy='ddp')": made, "a save": saved}


def _calls_of_a_step(dstrat: Any, net: Any, loader: Any, quiet: dict[str, Any]) -> float:
    """Return the number of calls of ours in a training step, from the difference of two fits."""

    def fit(steps: int) -> int:
        trainer = dstrat.Trainer(accelerator="cpu", devices=1, max_epochs=-1, max_steps=steps, **quiet)
        longer = torch.utils.data.DataLoader(loader.dataset, batch_size=1, sampler=[0] * 512)
        return calls(lambda: trainer.fit(net, longer))[0].total()

    import torch

    fit(1)
    return (fit(300) - fit(100)) / 200


if __name__ == "__main__":
    if "--functions" in sys.argv:
        for path, passed in paths()[1].items():
            print(f"{path}: {len(passed)} functions, {passed.total()} calls")
            for (file, function), number in sorted(passed.items()):
                print(f"{number:6}  {file:50} {function}")
        sys.exit()
    for name, value in {**size(), **state(), **paths()[0]}.items():
        print(f"{name:60} {value:>10,}")
