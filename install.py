"""`.venv/bin/python install.py`: install megatrain, editable, with what tests and checks use, into this environment.

uv installs, because it takes a fraction of pip's time; pip installs if uv cannot be had or fails. uv does not read
pip's configuration, so this program passes on what `pip config list` prints. On a machine without a GPU, uv installs
the CPU build of torch: a wheel from pip's find-links, or one from the index of CPU builds that uv knows. If it installs
a build for CUDA there, that is an error, unless MEGATRAIN_TORCH=cuda asks for one. pip has no such choice, so a build
for CUDA that pip installed is only reported. This file uses only the standard library, because it runs where nothing
else is installed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent
WHAT = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[dev]"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
QUIET = ("--quiet", "--quiet")
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
NOT_COMPILED = r"/(tests|transformers/models|torch/_inductor|torch/testing/_internal|moto|megatron)/"
"""Large packages of which tests and checks import little: Python compiles those modules at first use."""
COMPILE = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", NOT_COMPILED, sysconfig.get_path("purelib")]
BUILD_OF_TORCH = "import torch; print(torch.version.cuda or '')"


Run = Callable[[Sequence[str], Mapping[str, str] | None], "tuple[int, str]"]
"""Runs a command with an environment, or the process's own. Returns the exit code and what it wrote to stdout."""


def main() -> int:
    """Install. Returns the exit code: of pip or the import of torch if one failed, 1 if uv installed a wrong build."""
    return install(_run, os.environ, has_gpu=has_gpu())


def install(run: Run, environment: Mapping[str, str], *, has_gpu: bool) -> int:
    """Install with uv, else with pip, and check the build of torch. Returns the exit code; reasons go to stderr."""
    wants_cuda = has_gpu or environment.get("MEGATRAIN_TORCH") == "cuda"
    problem = _install_with_uv(run, environment, wants_cuda=wants_cuda)
    if problem:
        print(f"install.py: pip installs, because {problem}", file=sys.stderr)
        if code := run([*PIP, "install", *QUIET, *WHAT], None)[0]:
            return code
    code, cuda = run([sys.executable, "-c", BUILD_OF_TORCH], None)
    if not code and (wrong := build_problem(cuda.strip(), wants_cuda=wants_cuda)):
        print(f"install.py: {wrong}", file=sys.stderr)
        return 0 if problem else 1
    return code


def build_problem(cuda: str, *, wants_cuda: bool) -> str:
    """Return why the installed build of torch is wrong, or "". `cuda`: its CUDA version; empty for the CPU build."""
    if not cuda or wants_cuda:
        return ""
    return (
        f"torch is the build for CUDA {cuda}, which takes gigabytes, and this machine has no GPU; put a wheel "
        "torch-*+cpu-*.whl into a directory of pip's find-links (pip config set global.find-links DIRECTORY), or let "
        "uv reach torch's index of CPU builds, and repeat make venv; MEGATRAIN_TORCH=cuda make venv accepts this build"
    )


def torch_arguments(wheels: Sequence[str], *, wants_cuda: bool) -> list[str]:
    """Return uv's arguments for the build of torch. With a CPU wheel of find-links uv needs none: it prefers this wheel
    to the same version of an index."""
    return [] if wants_cuda or wheels else ["--torch-backend=cpu"]


def _install_with_uv(run: Run, environment: Mapping[str, str], *, wants_cuda: bool) -> str:
    """Install with uv. Returns "" or why that was not possible."""
    if run([*PIP, "install", *QUIET, "--quiet", "uv"], None)[0]:
        return "uv cannot be installed"
    options = pip_options(run([*PIP, "config", "list"], None)[1])
    build = torch_arguments(cpu_wheels(options.get("find-links", [])), wants_cuda=wants_cuda)
    code, _ = run([*UV, *uv_arguments(options), *build, *WHAT], {**uv_environment(options), **environment})
    if code:
        return f"uv ended with exit code {code}"
    # A file that cannot be compiled, such as a template, is no problem.
    run(COMPILE, None)
    return ""


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
    """Return uv's arguments for pip's constraints, sources and hosts; of several indexes the newest version wins."""
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


def _run(command: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int, str]:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
