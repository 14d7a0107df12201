"""Stand-ins for the CUDA libraries that a wheel of torch links, for tests on the CPU.

torch_xla needs a certain version of torch, and package indexes have it for Linux with CUDA only: 3 GB of libraries
that nothing calls on the CPU, but without which torch does not load. Run by the Python of the environment, after
``pip install --no-deps torch==... torch_xla==...``; it needs gcc, ldd and readelf. A user installs the ordinary wheels.
"""

import re
import subprocess
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path

# In torch's metadata, what its ordinary wheel requires beside its Python dependencies.
CUDA_REQUIREMENT = re.compile(r"^Requires-Dist: (nvidia-|triton\b).*\n", re.MULTILINE)
PYTHON_SYMBOL = re.compile(r"_?Py")  # which the interpreter defines
SOURCE = """#include <stdio.h>
#include <stdlib.h>
#define FUNCTION(name) void name(void) { fputs(#name " is not there: this torch is for the CPU\\n", stderr); abort(); }
"""


def missing_libraries(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Return the libraries that torch's Python module links and the loader does not find.

    Returns:
        For each library the symbols that torch asks for, by their version; the version is empty where there is none.
    """
    linked = output("ldd", "-r", folder / "libtorch_python.so")
    missing = sorted(set(re.findall(r"(\S+) => not found", linked)))
    library_of = {version: name for library in folder.glob("*.so*") for name, version in needed_versions(library)}
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for symbol, version in re.findall(r"undefined symbol: (\w+)(?:, version (\S+))?", linked):
        if version:
            symbols[library_of[version]][version].add(symbol)
        elif not PYTHON_SYMBOL.match(symbol):
            symbols[missing[0]][""].add(symbol)  # found in whichever library it is
    return symbols


def needed_versions(library: Path) -> list[tuple[str, str]]:
    """Return the names of the libraries whose versioned symbols a library needs, each with a version."""
    needs = output("readelf", "--version-info", "--wide", library).partition("Version needs section")[2]
    files = (block.partition("\n") for block in needs.split(" File: ")[1:])
    return [(head.split()[0], version) for head, _, names in files for version in re.findall(r"Name: (\S+)", names)]


def build_library(path: Path, symbols: dict[str, set[str]]) -> None:
    """Build a shared library of functions that end the process with their name.

    The loader wants all of them to be defined, as Python has it resolve all symbols when it loads a module.
    """
    functions = (f"FUNCTION({name})\n" for names in symbols.values() for name in sorted(names))
    source, versions = path.with_suffix(".c"), path.with_suffix(".map")
    source.write_text(SOURCE + "".join(functions), encoding="utf-8")
    listed = {version: "".join(f"{name};" for name in sorted(names)) for version, names in symbols.items() if version}
    versions.write_text("".join(f"{version} {{ {names} }};\n" for version, names in listed.items()), encoding="utf-8")
    script = [f"-Wl,--version-script={versions}"] if listed else []
    # Some functions have names that the compiler knows with other arguments.
    options = ["-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}", *script]
    subprocess.run(["gcc", *options, source, "-o", path], check=True)
    source.unlink()
    versions.unlink()


def output(*command: object) -> str:
    """Return what a program prints."""
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Build what is missing into torch's folder, and take the requirements that it replaces out of its metadata."""
    torch = distribution("torch")
    folder = Path(str(torch.locate_file("torch/lib")))
    for name, symbols in missing_libraries(folder).items():
        build_library(folder / name, symbols)
        print(f"{name}: {sum(map(len, symbols.values()))} functions")
    metadata = Path(str(torch.locate_file(f"torch-{torch.version}.dist-info/METADATA")))
    text = CUDA_REQUIREMENT.sub("", metadata.read_text(encoding="utf-8"))
    metadata.unlink()  # rather than written over: it may be a hard link that other environments share
    metadata.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
