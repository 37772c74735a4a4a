"""The documents are correct: their commands end with exit code 0, their Python runs, and their links lead to existing
targets.

Every document gets its own copy of the repository, where its blocks run in order: a later block finds the files of an
earlier one. A comment before a block that cannot run here gives the reason: `<!-- not run: needs 8 GPUs -->`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked_program import run_forked
from tests.helpers.markdown import MarkdownBlock, anchors, fenced_blocks, link_targets
from tests.helpers.source_tree import ROOT, documents, relative
from tests.helpers.waiting import DEADLINE_S

RUNNABLE = ("megatrain ", "python ", "make help")
# These commands, of README.md, start as users start them; all others need not import torch first.
STARTED_AS_BY_USERS = ("megatrain --help", "megatrain doctor")
COMMAND = "import sys; from megatrain.cli import main; sys.exit(main())"
SHELL = re.compile(r"[^\w\s=.,:/@%+'\"-]")
# The files of a checkout with its compiled modules, which cold processes would otherwise compile again; environments,
# runs and build outputs are not copied.
COPIED = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "README.md", "megatrain", "configs", "docs")

# Documents that name places in the code: `path` or `path::name`, where NAME in a path stands for any name.
NAMING_PLACES = ("docs/architecture.md", "docs/guides/extending.md")
PLACE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*)(?:::([\w.]+))?`")

# The demo must learn, so its steps are long; the steps of a document only have to run.
DEMO = "configs/demo.toml"
SMALLER = {"micro_batch_size = 8": "micro_batch_size = 2", "global_batch_size = 32": "global_batch_size = 8"}


def runnable_blocks(path: Path) -> list[MarkdownBlock]:
    """Return the runnable blocks of a document: all console and python blocks without a reason not to run."""
    blocks = fenced_blocks(path.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language in ("console", "python") and not block.skip_reason]


def copy_repository(destination: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name)
        elif source.exists():
            shutil.copy2(source, destination / name)
    text = (destination / DEMO).read_text(encoding="utf-8")
    for reported, smaller in SMALLER.items():
        assert reported in text
        text = text.replace(reported, smaller)
    (destination / DEMO).write_text(text, encoding="utf-8")


def run(command: list[str], directory: Path, where: str, text: str) -> None:
    options = {"cwd": directory, "env": environment(), "timeout": DEADLINE_S}
    check(subprocess.run(command, capture_output=True, text=True, check=False, **options), where, text)


def run_fork(arguments: list[str], directory: Path, where: str, text: str) -> None:
    """Run a Python program that need not import torch first."""
    done = run_forked(arguments, directory=directory, environment=environment())
    check(done, where, text)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def check(done: subprocess.CompletedProcess[str], where: str, text: str) -> None:
    assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{text}\n{done.stdout}{done.stderr}"


def own_arguments(command: str) -> list[str] | None:
    """Return the arguments of a `megatrain` command that a shell would only split; None for any other command."""
    arguments = shlex.split(command)
    return arguments[1:] if arguments[0] == "megatrain" and not SHELL.search(command) else None


@pytest.mark.slow(kept=["README.md"])
@pytest.mark.timeout(480)
@pytest.mark.parametrize("path", [path for path in documents() if runnable_blocks(path)], ids=relative)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path)
    for block in runnable_blocks(path):
        where = f"{relative(path)}:{block.line}"
        if block.language == "python":
            run_fork(["-c", block.text], tmp_path, where, block.text)
        for command in block.commands:
            assert f"{command} ".startswith(RUNNABLE), (
                f"{where}: say why it is not run, `<!-- not run: ... -->`: {command}"
            )
            arguments = own_arguments(command)
            if arguments is None or command in STARTED_AS_BY_USERS:
                run(["bash", "-c", command], tmp_path, where, command)
            else:
                run_fork(["-c", COMMAND, *arguments], tmp_path, where, command)


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for path in documents():
        for target in link_targets(path.read_text(encoding="utf-8")):
            if ":" in target.split("/", maxsplit=1)[0]:  # https:, mailto:
                continue
            name, _, anchor = target.partition("#")
            linked = path.parent / name if name else path
            if not linked.exists() or (anchor and anchor not in anchors(linked.read_text(encoding="utf-8"))):
                broken.append(f"{relative(path)}: {target}")
    assert not broken, "\n".join(broken)


def test_named_files_and_names_are_there() -> None:
    assert [place for document in NAMING_PLACES for place in lost_places((ROOT / document).read_text())] == []


def lost_places(text: str) -> list[str]:
    """Return the places of a document that do not exist in this repository. A path begins at its root."""
    tops = {path.name for path in ROOT.iterdir()}
    places = [(path, name) for path, name in PLACE.findall(text) if name or path.partition("/")[0] in tops]
    return [f"{path}::{name}".removesuffix("::") for path, name in places if not is_there(path, name.split("."))]


def is_there(path: str, names: list[str]) -> bool:
    """Return whether files have this path, and one of them contains all of these names."""
    files = list(ROOT.glob(path.replace("NAME", "*")))
    if names == [""]:
        return bool(files)
    words = (set(re.findall(r"\w+", file.read_text(encoding="utf-8"))) for file in files)
    return any(words_of_file.issuperset(names) for words_of_file in words)


def test_a_lost_place_is_found() -> None:
    text = "`tests/NAME/test_documents.py::is_there`, `tests/docs/gone.py`, `Makefile::no_name`, `test_gone.py::PLACE`"
    assert lost_places(text) == ["tests/docs/gone.py", "Makefile::no_name", "test_gone.py::PLACE"]
    assert lost_places("`megatrain.contracts`, `megatrain diag`, `model/norm.py`, `megatrain/ops`") == []
