"""The processes of a run share the work of compiling the test modules.

pytest rewrites and compiles each test module when it is first imported, and every process of xdist imports all of them
in the same order. In a fresh clone, each of them would compile everything. So each process first imports every n-th
module: then most modules are compiled when the collection reaches them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest


def import_share(arguments: Sequence[str], number: int, count: int) -> None:
    """Import every `count`-th test module of the directories among `arguments`, beginning with module `number`.

    Errors of a module are left to the collection, which imports it again and reports them.
    """
    folders = [Path(argument) for argument in arguments if Path(argument).is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    for file in files[number::count]:
        # as pytest does for a file outside any package; each entry is searched for every module, by child processes too
        if sys.path[0] != (folder := str(file.parent.absolute())):
            sys.path.insert(0, folder)
        with suppress(Exception, pytest.skip.Exception):
            import_module(file.stem)
