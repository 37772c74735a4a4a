"""Rules on source files, csrc included, that no linter checks."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.helpers import backend_packages
from tests.helpers.source_tree import ROOT, documents, imported_modules, naming, nodes, python_files, relative

MAX_FILE_LINES = 450
MAX_FILE_BYTES = 1_000_000

# A module without a concept in its name collects unrelated code. Only the tests have a package for that.
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

# Only comm uses torch.distributed; the doctor inspects backends. No module uses torch.distributed.checkpoint, because
# megatrain reads and writes its format itself.
DISTRIBUTED_PLACES = ("megatrain/comm/", "launcher/megatrain_launcher/", "megatrain/commands/doctor/torch_probe.py")

# The environment names the network card for gloo and NCCL, a forked worker gets the given one, and torchrun's workers
# have no other source for the number of their round; we set nothing else.
ENVIRONMENT_WRITERS = (
    "megatrain/comm/",
    "megatrain/data/tokenizing.py",
    "launcher/megatrain_launcher/standby/",
    "launcher/megatrain_launcher/rendezvous/handler.py",
)

PACKAGE = python_files("megatrain", "launcher", "diagnostics")
ALL_PYTHON = [*PACKAGE, *python_files("tests", "benchmarks"), ROOT / "setup.py", ROOT / "install.py"]
ASCII_FILES = [
    *ALL_PYTHON,
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")),
    *(ROOT / "configs").glob("*.toml"),
]


def is_below(path: Path, places: tuple[str, ...]) -> bool:
    return relative(path).startswith(places)


def environment_writes(found: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines that change os.environ."""
    for node in found:
        match node:
            case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Store() | ast.Del()):
                yield node.lineno
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(attr="environ"), attr="update" | "setdefault" | "pop" | "clear" | "popitem"
                )
            ):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="putenv" | "unsetenv")):
                yield node.lineno


def test_files_are_ascii() -> None:
    found = [
        f"{relative(path)}:{number}"
        for path in ASCII_FILES
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if not line.isascii()
    ]
    assert not found, f"lines that are not ASCII: {', '.join(found)}"


def test_files_name_no_place_of_one_machine() -> None:
    found = [
        f"{relative(path)}: {place}"
        for path in [*ASCII_FILES, *documents()]
        for place in re.findall(r"(?<![\w.])/(?:home|root|Users)/\w+", path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    found = [relative(path) for path in ALL_PYTHON if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert not found, f"longer than {MAX_FILE_LINES} lines: {', '.join(found)}"


def test_no_file_is_bulk() -> None:
    """A package or a recording that is committed by mistake stays in the history of the project."""
    ignored = {line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()} | {".git"}
    found = [
        f"{relative(path)}: {path.stat().st_size:,} bytes"
        for entry in ROOT.iterdir()
        if entry.name not in ignored
        for path in ([entry] if entry.is_file() else entry.rglob("*"))
        if path.is_file() and not ignored & set(path.relative_to(ROOT).parts) and path.suffix not in (".so", ".pyc")
        if path.stat().st_size > MAX_FILE_BYTES
    ]
    assert not found, "\n".join(found)


def test_modules_are_named_for_a_concept() -> None:
    vague = [relative(path) for path in PACKAGE if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES]
    assert not vague


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test by its bare name: of two files with one name, only one can be collected in a run."""
    twins = [name for name, count in Counter(path.name for path in python_files("tests")).items() if count > 1]
    assert [name for name in twins if name.startswith("test_")] == []


def test_torch_distributed_is_imported_in_its_places_only() -> None:
    found = [
        f"{relative(path)}:{line}: {module}"
        for path in naming(PACKAGE, "distributed")
        for module, line in imported_modules(path)
        if (module + ".").startswith("torch.distributed.")
        and (module.startswith("torch.distributed.checkpoint") or not is_below(path, DISTRIBUTED_PLACES))
    ]
    assert not found, "\n".join(found)


def test_no_module_imports_an_optional_backend() -> None:
    """The one place that loads them imports them by the text of their names, on request."""
    importers = {
        relative(path)
        for path in naming(PACKAGE, *backend_packages.NAMES)
        for module, _ in imported_modules(path)
        if module.partition(".")[0] in backend_packages.NAMES
    }
    assert not importers


def test_the_environment_is_no_configuration_bus() -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in naming(PACKAGE, "environ", "putenv", "unsetenv")
        for line in environment_writes(nodes(path, ast.Subscript, ast.Call))
        if not is_below(path, ENVIRONMENT_WRITERS)
    ]
    assert not found, f"os.environ is written in {', '.join(found)}"


def test_environment_writes_are_found() -> None:
    source = (
        "os.environ['A'] = '1'\ndel os.environ['A']\nos.environ.update(b)\nx = os.environ['A']\nos.putenv('A', '')\n"
    )

    assert sorted(environment_writes(ast.walk(ast.parse(source)))) == [1, 2, 3, 5]


def sleeps(found: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines that call a function named sleep, also in programs within strings."""
    for node in found:
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
                yield node.lineno
            case ast.Constant(value=str(text)) if "sleep" in text and re.search(r"\bsleep\(", text):
                yield node.lineno


def test_no_test_sleeps() -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in naming(python_files("tests"), "sleep")
        for line in sleeps(nodes(path, ast.Call, ast.Constant))
    ]
    assert not found, f"wait on a condition with a deadline instead: {', '.join(found)}"


def test_sleeps_are_found() -> None:
    call = "sleep" + "(1)"
    source = (
        f"time.{call}\n{call}\nprogram = 'import time; time.{call}'\nsleep = asleep(1)\npatch('time.sleep', wake)\n"
    )
    assert sorted(sleeps(ast.walk(ast.parse(source)))) == [1, 2, 3]


KERNELS = {path.name: path.read_text() for path in sorted((ROOT / "csrc" / "kernels").glob("*.cu*"))}
DEVICE_FUNCTION = re.compile(r"^(?:__device__|template).*?\b(\w+)\(([^)]*)\)\s*\{", re.MULTILINE)


def test_every_kernel_has_its_launch_bounds() -> None:
    kernels = [
        (name, line) for name, text in KERNELS.items() for line in re.findall(r"^.*__global__.*$", text, re.MULTILINE)
    ]

    assert len(kernels) > 20
    assert [kernel for kernel in kernels if "__launch_bounds__" not in kernel[1]] == []


def test_no_kernel_uses_atomics() -> None:
    assert [name for name, text in KERNELS.items() if re.search(r"\batomic\w+\(|red\.|atom\.", text)] == []


def test_each_kernel_name_is_one_function() -> None:
    # Inline functions with one signature in two headers are one symbol to the linker, which keeps one of the bodies.
    places = defaultdict(set)
    for name, text in KERNELS.items():
        for function, arguments in DEVICE_FUNCTION.findall(text):
            places[function, re.sub(r"\s*\w+(,|$)", r"\1", arguments)].add(name)

    assert places
    assert {key: files for key, files in places.items() if len(files) > 1} == {}
