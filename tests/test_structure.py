"""The structure of the source: no cycles, no fragments, one meaning for a class name, noun phrases as docstrings."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
SHORT = 80  # lines

# Short modules that only one other imports, and why each is a file of its own.
SHORT_FOR_A_REASON = {
    "dstrat.cli.checkpoint.convert": "a command, as its siblings are",
    "dstrat.cli.main": "the entry point of the console script",
    "dstrat.launch.fork_server": "imported by multiprocessing's fork server, by its name",
    "dstrat.testing.simulated_gpu.extension": "a program too, which compiles ahead of tests",
    "dstrat.testing.strategy.evaluation": "standard tests of one capability, as its siblings are",
    "dstrat.testing.strategy.records": "standard tests of one tier, as its siblings are",
    "dstrat.training.profilers.defaults": "names of profilers, without importing any",
    "dstrat_colossalai.precision": "the role has this file name in every package",
    "dstrat_deepspeed.communication": "the role has this file name in every package",
    "dstrat_deepspeed.precision": "the role has this file name in every package",
    "dstrat_xla.loader": "loads torch_xla's loader, which needs a device, on first use",
}

# Folders whose identifiers use the field's terms; add each as it becomes clean.
CLEAN = (
    "dstrat.builtin",
    "dstrat.checkpoint",
    "dstrat.cli",
    "dstrat.data",
    "dstrat.interfaces",
    "dstrat.launch",
    "dstrat.own_loop",
    "dstrat.parallel",
    "dstrat.plugins",
    "dstrat.testing",
    "dstrat.training",
    "dstrat_bagua",
    "dstrat_colossalai",
    "dstrat_ddp",
    "dstrat_deepspeed",
    "dstrat_diloco",
    "dstrat_fairscale",
    "dstrat_fsdp",
    "dstrat_hivemind",
    "dstrat_horovod",
    "dstrat_hpu",
    "dstrat_ipu",
    "dstrat_lightning",
    "dstrat_mesh",
    "dstrat_ray",
    "dstrat_torchao",
    "dstrat_torchft",
    "dstrat_transformers",
    "dstrat_xla",
)

# Words that say too little in an identifier: "position", "shard", "path", "matches", "local", "remaining" ... say more.
VAGUE = {
    *("place", "places", "placed", "part", "parts", "own", "given", "told", "tell", "asked", "ask", "left", "found"),
    *("chosen", "whole", "what", "whose", "waiting", "taken", "kept", "words", "others", "there", "here", "deed"),
    *("circumstances", "surroundings", "everyday", "company", "somebody", "nobody"),
}

# Identifiers that have such a word all the same.
VAGUE_FOR_A_REASON = {
    "OwnLoop": "public",
    "Parts": "public",
    "parts": "Strategy.parts, a first name",
    "given_parts": "Strategy.given_parts, a first name",
    "runs_here": "Launcher.runs_here, of the interface",
    "taken_from": "FlatShard.taken_from, of the interface",
}


def name_of(path):
    source = next(parent for parent in path.parents if parent.name == "src")
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def texts():
    paths = (path for path in PACKAGES.glob("*/src/**/*.py") if "template" not in path.parts)
    return {name_of(path): path.read_text(encoding="utf-8") for path in sorted(paths)}


@pytest.fixture(scope="module")
def trees(texts):
    return {name: ast.parse(text) for name, text in texts.items()}


def imported(statements, modules):
    """Give the modules of ours that import statements name."""
    for node in statements:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def cycle(graph):
    """Return the modules of a cycle, empty where there is none."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                if found := visit(other):
                    return found
            path.pop()
            done.add(name)
        return []

    return next(filter(None, map(visit, sorted(graph))), [])


def test_modules_import_each_other_without_cycles(trees):
    graph = {name: set(imported(tree.body, trees)) & trees.keys() - {name} for name, tree in trees.items()}
    assert cycle(graph) == []


def test_a_cycle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_short_modules_are_used_by_several_or_named_by_users(texts, trees):
    users = defaultdict(set)
    for name, tree in trees.items():
        for other in imported(ast.walk(tree), trees):
            users[other].add(name)
    targets = set(re.findall(r'"(dstrat[\w.]*?)(?:"|:\w)', "\n".join(texts.values())))
    public = {name for name in texts if name.startswith("dstrat.") and name.count(".") == 1}
    fragments = {
        name
        for name, text in texts.items()
        if len(text.splitlines()) < SHORT
        and len(users[name]) <= 1
        and not name.endswith(".plugin")
        and name not in targets | public
        and not any(other.startswith(f"{name}.") for other in texts)
    }
    assert fragments <= SHORT_FOR_A_REASON.keys(), "merge each with the module that imports it"


def test_a_class_name_has_one_meaning_in_a_distribution(trees):
    homes = defaultdict(set)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[name.partition(".")[0], node.name].add(name)
    twice = {cls for (_, cls), modules in homes.items() if len(modules) > 1}
    assert twice == set()


def test_docstrings_of_modules_are_noun_phrases(trees):
    clause = re.compile(r"(what|how|where|when|whether|who|whose|which|why)\b", re.IGNORECASE)
    documented = {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}
    assert [name for name, text in documented.items() if clause.match(text)] == []


# Of modules and optimizers of torch: subclasses and other libraries rely on them, as on public names.
TORCH_NAMES = {"_apply", "_buffers", "_modules", "_opt_called", "_parameters", "_version"}


def private_names(tree):
    """Return the private attributes of other objects that a module touches."""
    touched, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            (own if ast.unparse(node.value) in ("self", "cls") else touched).add(node.attr)
    return touched - own - TORCH_NAMES


# Modules that override private methods of a dependency's class, which they import when they are imported.
OVERRIDES = {"dstrat_transformers.trainer"}


@pytest.mark.parametrize(
    ("adapter", "least"),
    [
        ("dstrat_bagua.buckets", 2),
        ("dstrat_colossalai.internals", 1),
        ("dstrat_ddp.reducer", 3),
        ("dstrat_deepspeed.internals", 11),
        ("dstrat_fairscale.internals", 2),
        ("dstrat_fsdp.internals", 11),
        ("dstrat_hivemind.internals", 5),
        ("dstrat_horovod.internals", 2),
        ("dstrat_ipu.runtime", 1),
        ("dstrat_lightning.internals", 2),
        ("dstrat_transformers.models", 3),
        ("dstrat_xla.runtime", 11),
    ],
)
def test_private_names_of_a_dependency_are_in_one_file(trees, adapter, least):
    package = adapter.partition(".")[0]
    modules = [name for name in trees if name.startswith(f"{package}.") and name not in OVERRIDES]
    touched = {name: private_names(trees[name]) for name in modules}
    assert len(touched.pop(adapter)) >= least
    assert {name: names for name, names in touched.items() if names} == {}


STANDARD_ARGUMENTS = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
}


def undocumented(cls):
    """Return the standard arguments of a class's constructor that its docstring does not describe."""
    constructors = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = {arg.arg for node in constructors for arg in (*node.args.args, *node.args.kwonlyargs)}
    described = set(re.findall(r"^ *(\w+): ", ast.get_docstring(cls) or "", re.MULTILINE))
    return (names & STANDARD_ARGUMENTS) - described


def test_strategies_describe_the_standard_arguments_for_the_help_of_commands(trees):
    classes = {
        node.name: undocumented(node)
        for name, tree in trees.items()
        if not name.startswith(("dstrat.interfaces", "dstrat.parallel"))  # bases of authors: a class of users has them
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Strategy") and not node.name.startswith("_")
    }
    assert len(classes) > 20
    assert {name: missing for name, missing in classes.items() if missing} == {}


def identifiers(tree):
    """Give the names that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def is_vague(name):
    """Return whether one of an identifier's words says too little; names of tests are sentences."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return not name.startswith("test_") and name not in VAGUE_FOR_A_REASON and not VAGUE.isdisjoint(words)


def test_identifiers_have_no_vague_words(trees):
    clean = re.compile(rf"({'|'.join(map(re.escape, CLEAN))})(\.|$)")
    vague = {(module, name) for module in filter(clean.match, trees) for name in identifiers(trees[module])}
    assert sorted(pair for pair in vague if is_vague(pair[1])) == [], "choose the field's term"


def test_a_vague_word_is_found():
    tree = ast.parse("class KeptFiles:\n    def add(self, path):\n        self.found, test_what_it_is = path, 1\n")
    assert set(filter(is_vague, identifiers(tree))) == {"KeptFiles", "found"}


# Modules that may name a type of device, and why; all others ask the accelerator what differs.
NAME_A_DEVICE_TYPE = {
    "dstrat.builtin.accelerators": "the accelerators themselves",
    "dstrat.testing.simulated_gpu": "the simulated GPU",
    "dstrat_colossalai.strategy": "a library for NVIDIA's GPUs alone",
    "dstrat_deepspeed.optimizers": "operations that DeepSpeed compiles with CUDA's toolkit",
    "dstrat_fairscale": "a library for NVIDIA's GPUs alone",
    "dstrat_hpu": "the package of that type of device",
    "dstrat_torchao": "8-bit floats of NVIDIA's tensor cores",
    "dstrat_xla": "the package of that type of device",
}
_EVERYWHERE = {"cpu", "meta"}  # types that every torch has
_MODULES_OF_DEVICES = {("torch", name) for name in ("cuda", "hpu", "mps", "mtia", "npu", "xpu")}


def device_types(tree):
    """Give the lines that compare with the type of a device, or use the module of one, such as torch.cuda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {getattr(side, "attr", getattr(side, "id", None)) for side in sides}
            texts = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
            if names & {"type", "device_type"} and any(isinstance(text, str) for text in texts - _EVERYWHERE):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and (getattr(node.value, "id", None), node.attr) in _MODULES_OF_DEVICES:
            yield node.lineno


def test_types_of_devices_are_named_by_accelerators_alone(trees):
    excused = re.compile(rf"({'|'.join(map(re.escape, NAME_A_DEVICE_TYPE))})(\.|$)")
    named = {
        name: lines for name, tree in trees.items() if not excused.match(name) and (lines := [*device_types(tree)])
    }
    assert named == {}, "ask the accelerator: has_streams, supports_dtype, get_device_name ..."


@pytest.mark.parametrize(
    "line", ['device.type == "cuda"', 'device_type in ("cpu", "mps")', "torch.cuda.synchronize()", 'x.type != "xpu"']
)
def test_a_named_type_of_device_is_found(line):
    assert [*device_types(ast.parse(line))] == [1]


def test_the_types_that_every_torch_has_may_be_named():
    assert [*device_types(ast.parse('device.type == "cpu" or kind == "cuda"'))] == []
