"""`.venv/bin/python install.py`: install megatrain, editable, with what tests and checks use, into this environment.

uv installs, because it takes a fraction of pip's time; pip does where uv cannot be had or fails. uv does not read pip's
configuration, so what `pip config list` prints is passed on. On a machine without a GPU the CPU build of torch is
installed where it can be had: a wheel among pip's find-links, or the index that uv knows. This file uses only the
standard library, because it runs where nothing else is installed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent
WHAT = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[dev]"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
QUIET = ("--quiet", "--quiet")
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, "--compile-bytecode"]
BUILD_OF_TORCH = "import torch; print(torch.version.cuda or '')"


def main() -> int:
    """Install, and return the exit code of what installed. Says why pip was used, and what torch is for."""
    problem = _install_with_uv()
    if problem:
        print(f"install.py: pip installs, because {problem}", file=sys.stderr)
        if code := _run([*PIP, "install", *QUIET, *WHAT]).returncode:
            return code
    cuda = subprocess.run([sys.executable, "-c", BUILD_OF_TORCH], capture_output=True, text=True, check=True)
    if cuda.stdout.strip() and not has_gpu():
        print(
            f"install.py: torch is the build for CUDA {cuda.stdout.strip()}, which takes gigabytes, and this machine "
            "has no GPU; the CPU build is installed from a wheel in pip's find-links, or where uv reaches its index",
            file=sys.stderr,
        )
    return 0


def _install_with_uv() -> str:
    """Install with uv. Returns "" or why that was not possible."""
    if _run([*PIP, "install", *QUIET, "uv"], is_quiet=True).returncode:
        return "uv cannot be installed"
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    options = pip_options(listed.stdout)
    arguments = uv_arguments(options)
    if not has_gpu() and not cpu_wheels(options.get("find-links", [])):
        arguments.append("--torch-backend=cpu")
    done = _run([*UV, *arguments, *WHAT], {**uv_environment(options), **os.environ})
    return f"uv ended with exit code {done.returncode}" if done.returncode else ""


def pip_options(listed: str) -> dict[str, list[str]]:
    """Return pip's options for installing by name, from the lines `SECTION.NAME='VALUES'` of `pip config list`.

    A later section hides an earlier one: global, then install, then the environment.
    """
    found: dict[str, dict[str, list[str]]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section.rstrip(".") in found and value:
            found[section.rstrip(".")][name] = str(ast.literal_eval(value)).split()
    return {**found["global"], **found["install"], **found[":env:"]}


def uv_arguments(options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return uv's arguments for the same packages and places; of several indexes the newest version wins."""
    names = {
        "constraint": "--constraint", "find-links": "--find-links", "trusted-host": "--allow-insecure-host",
    }  # fmt: skip
    arguments = [word for name, option in names.items() for value in options.get(name, []) for word in (option, value)]
    if "extra-index-url" in options:
        arguments += ["--index-strategy", "unsafe-best-match"]
    if options.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    return arguments


def uv_environment(options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the environment variables that uv needs for pip's indexes, certificates and proxy.

    Addresses of indexes may contain passwords, and the arguments of a process are visible to all users.
    """
    variables = {
        "index-url": ("UV_DEFAULT_INDEX",), "extra-index-url": ("UV_INDEX",), "cert": ("SSL_CERT_FILE",),
        "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    }  # fmt: skip
    return {one: " ".join(options[name]) for name, ones in variables.items() if name in options for one in ones}


def cpu_wheels(find_links: Sequence[str]) -> list[str]:
    """Return the names of the wheels of torch's CPU build that lie in directories of `find_links`."""
    directories = [unquote(urlsplit(link).path) if link.startswith("file:") else link for link in find_links]
    return sorted(path.name for directory in directories for path in Path(directory).glob("torch-*+cpu-*.whl"))


def has_gpu() -> bool:
    """Return whether NVIDIA's driver is loaded on this machine."""
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, is_quiet: bool = False
) -> subprocess.CompletedProcess[bytes]:
    output = subprocess.DEVNULL if is_quiet else None
    return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)


if __name__ == "__main__":
    sys.exit(main())
