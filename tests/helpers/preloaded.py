"""Shared libraries in C that tests compile once a session."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.helpers.require import require


@functools.cache
def compiled(source: str, name: str) -> Path:
    """Return the library `name`, compiled from a C file beside this one."""
    compiler = shutil.which("cc")
    require("compiler", compiler is not None, "no cc on PATH")
    library = Path(tempfile.mkdtemp(prefix="library-")) / name
    arguments = [
        str(compiler),
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(Path(__file__).with_name(source)),
        "-ldl",
    ]
    subprocess.run(arguments, check=True, capture_output=True)
    return library
