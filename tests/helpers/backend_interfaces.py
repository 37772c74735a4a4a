"""The signatures of NVIDIA's packages, read from their sources without importing them: no GPU and no compiler is
needed.

Run it to read Transformer Engine's wheels again, of which the package index has only the Python part:

    python -m tests.helpers.backend_interfaces > tests/golden/backend_interfaces.json
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "backend_interfaces.json"
READ = {
    "transformer_engine.pytorch": ("Linear", "Linear.forward", "autocast"),
    "transformer_engine.common.recipe": ("Float8CurrentScaling",),
}
"""The functions that megatrain calls, by the module that it imports."""
VERSIONS = ("2.9.0", "2.16.1", "2.20.2")
"""The oldest supported version, the first that keeps the weight until backward, and the newest."""
Signatures = Mapping[str, str]
"""Name -> parameters without annotations and without self; defaults that are not constants are `...`."""
Sources = Callable[[str], str | None]
"""Returns the text of a file of a package by its path, or None."""


def recorded() -> dict[str, dict[str, Signatures]]:
    """Return the signatures of each version of each package."""
    found: dict[str, dict[str, Signatures]] = json.loads(GOLDEN.read_text())
    return found


def read_interface(sources: Sources) -> dict[str, str]:
    """Return the signatures of everything in READ. Raises: LookupError for a name that its module does not define."""
    return {
        name: ", ".join(_parameters(_definition(sources, module, name.partition(".")[0]), name.partition(".")[2]))
        for module, names in READ.items()
        for name in names
    }


def wheel_sources(wheel: Path) -> Sources:
    """Return the files of a wheel."""
    archive = zipfile.ZipFile(wheel)
    names = frozenset(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def download(version: str, directory: Path) -> Path:
    """Return the wheel of Transformer Engine's Python part; version: "" for the newest.

    Raises: OSError where the package index is not reached.
    """
    requirement = f"transformer_engine=={version}" if version else "transformer_engine"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", requirement]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed")
    (wheel,) = directory.glob(f"transformer_engine-{version or '*'}-*.whl")
    return wheel


def signature(parameters: str) -> inspect.Signature:
    """Return the signature with these parameters."""
    arguments = ast.parse(f"lambda {parameters}: None", mode="eval").body.args  # type: ignore[attr-defined]
    without = len(arguments.args) - len(arguments.defaults)
    defaults = [inspect.Parameter.empty] * without + [ast.literal_eval(one) for one in arguments.defaults]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(one.arg, kind, default=default)
            for one, default in zip(arguments.args, defaults, strict=True)
        ]
    )


def _definition(sources: Sources, module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition behind a name of `module`, following its imports."""
    path = module.replace(".", "/")
    is_package = (text := sources(f"{path}/__init__.py")) is not None
    if text is None and (text := sources(f"{path}.py")) is None:
        raise LookupError(f"no module {module}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(sources, _imported(module, is_package, node), alias.name)
    raise LookupError(f"{module} has no {name}")


def _imported(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Return the module that `node` in `module` imports from."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _parameters(node: ast.ClassDef | ast.FunctionDef, method: str) -> list[str]:
    """Return the parameters of a call: of a function, of a class, or of a method of it."""
    if isinstance(node, ast.FunctionDef):
        return _of_function(node)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == (method or "__init__"):
            return _of_function(one)[1:]
    if method:
        raise LookupError(f"{node.name} has no {method}")
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    return [_text(ast.unparse(one.target), one.value) for one in fields]


def _of_function(node: ast.FunctionDef) -> list[str]:
    without = len(node.args.args) - len(node.args.defaults)
    defaults = [None] * without + list(node.args.defaults)
    return [_text(one.arg, default) for one, default in zip(node.args.args, defaults, strict=True)]


def _text(name: str, default: ast.expr | None) -> str:
    if default is None:
        return name
    return f"{name}={ast.unparse(default) if isinstance(default, ast.Constant) else '...'}"


def main() -> None:
    """Print the new content of GOLDEN: the versions of Transformer Engine read again, the others unchanged."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for version in VERSIONS:
            found[version] = read_interface(wheel_sources(download(version, Path(directory))))
    print(json.dumps({**recorded(), "transformer_engine": found}, indent=2))


if __name__ == "__main__":
    main()
