"""The documents tell the truth: their commands end with exit code 0, their Python runs, their links lead somewhere.

Every document gets a copy of the repository of its own, where its blocks run in order: a later block finds what an
earlier one made. What cannot run here says why in a comment before the block: `<!-- not run: needs 8 GPUs -->`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.markdown import Block, anchors, fenced_blocks, link_targets
from tests.helpers.source_tree import ROOT, documents, relative

RUNNABLE = ("megatrain ", "python ", "make help")
BLOCK_TIMEOUT_S = 120
# What a checkout has; build products, environments and runs stay behind.
COPIED = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "README.md", "megatrain", "configs", "docs")


def runnable_blocks(path: Path) -> list[Block]:
    """Return the blocks of a document that can be run, which is every console and python block without a reason."""
    blocks = fenced_blocks(path.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language in ("console", "python") and not block.skip_reason]


def copy_repository(destination: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, destination / name)


def run(command: list[str], directory: Path, where: str, text: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env=environment, timeout=BLOCK_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{text}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(4 * BLOCK_TIMEOUT_S)
@pytest.mark.parametrize("path", [path for path in documents() if runnable_blocks(path)], ids=relative)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path)
    for block in runnable_blocks(path):
        where = f"{relative(path)}:{block.line}"
        if block.language == "python":
            run([sys.executable, "-c", block.text], tmp_path, where, block.text)
        for command in block.commands:
            assert f"{command} ".startswith(RUNNABLE), (
                f"{where}: say why it is not run, `<!-- not run: ... -->`: {command}"
            )
            run(["bash", "-c", command], tmp_path, where, command)


@pytest.mark.parametrize("path", documents(), ids=relative)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for target in link_targets(path.read_text(encoding="utf-8")):
        if ":" in target.split("/", maxsplit=1)[0]:  # https:, mailto:
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked.read_text(encoding="utf-8"))):
            broken.append(target)
    assert not broken
