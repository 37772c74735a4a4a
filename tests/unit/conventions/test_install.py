"""`make venv` passes pip's configuration to uv, and selects a build of torch that the machine can get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from install import build_problem, cpu_wheels, install, pip_options, torch_arguments, uv_arguments, uv_environment

LISTED = """\
:env:.find-links='/srv/wheels'
:env:.timeout='60'
download.find-links='/elsewhere'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='file:///srv/a file:///srv/b'
global.find-links='/old'
global.index-url='https://packages.example.org/simple'
install.constraint='/etc/pip/a.txt\\n/etc/pip/b.txt'
"""


def test_precedence_of_pip_options() -> None:
    assert pip_options(LISTED) == {
        "find-links": ["/srv/wheels"],
        "timeout": ["60"],
        "constraint": ["/etc/pip/a.txt", "/etc/pip/b.txt"],
        "extra-index-url": ["file:///srv/a", "file:///srv/b"],
        "index-url": ["https://packages.example.org/simple"],
    }


def test_no_pip_options_are_configured() -> None:
    assert pip_options("") == {}
    assert uv_arguments({}) == []
    assert uv_environment({}) == {}


def test_arguments_of_uv() -> None:
    cases: list[tuple[dict[str, list[str]], list[str]]] = [
        ({"constraint": ["a", "b"]}, ["--constraint", "a", "--constraint", "b"]),
        ({"find-links": ["/w"]}, ["--find-links", "/w"]),
        ({"index-url": ["https://user:secret@i"]}, []),
        ({"extra-index-url": ["https://e"]}, ["--index-strategy", "unsafe-best-match"]),
        ({"trusted-host": ["h"]}, ["--allow-insecure-host", "h"]),
        ({"no-index": ["true"]}, ["--no-index"]),
        ({"no-index": ["false"]}, []),
        ({"timeout": ["60"]}, []),
    ]
    for options, arguments in cases:
        assert uv_arguments(options) == arguments, options


def test_indexes_certificates_and_proxy_go_by_the_environment() -> None:
    options = {
        "cert": ["/etc/ca.crt"],
        "proxy": ["http://proxy:3128"],
        "index-url": ["https://user:secret@i"],
        "extra-index-url": ["https://e", "https://f"],
    }
    assert uv_environment(options) == {
        "SSL_CERT_FILE": "/etc/ca.crt",
        "HTTP_PROXY": "http://proxy:3128",
        "HTTPS_PROXY": "http://proxy:3128",
        "UV_DEFAULT_INDEX": "https://user:secret@i",
        "UV_INDEX": "https://e https://f",
    }


def test_wheels_of_the_cpu_build_are_found_in_directories_only(tmp_path: Path) -> None:
    name = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (tmp_path / name).touch()
    (tmp_path / "torch-2.13.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert cpu_wheels([str(tmp_path)]) == [name]
    assert cpu_wheels([tmp_path.as_uri()]) == [name]
    assert cpu_wheels(["https://wheels.example.org/", str(tmp_path / "missing")]) == []


@pytest.mark.parametrize(
    ("wheels", "wants_cuda", "arguments"),
    [([], False, ["--torch-backend=cpu"]), (["torch-2.13.0+cpu-any.whl"], False, []), ([], True, [])],
)
def test_cpu_build_of_torch_is_selected(wheels: list[str], wants_cuda: bool, arguments: list[str]) -> None:
    assert torch_arguments(wheels, wants_cuda=wants_cuda) == arguments


@pytest.mark.parametrize(
    ("cuda", "wants_cuda", "is_wrong"),
    [("", False, False), ("13.0", True, False), ("", True, False), ("13.0", False, True)],
)
def test_cuda_build_without_a_gpu_is_a_problem(cuda: str, wants_cuda: bool, is_wrong: bool) -> None:
    problem = build_problem(cuda, wants_cuda=wants_cuda)
    assert bool(problem) is is_wrong
    assert all(word in problem for word in ("CUDA 13.0", "find-links", "MEGATRAIN_TORCH=cuda")) or not is_wrong


class Commands:
    """Runs no command: records the commands, and returns the given exit codes."""

    def __init__(self, codes: Mapping[str, int], cuda: str) -> None:
        self.codes, self.cuda = codes, cuda
        self.ran: list[str] = []
        self.words: list[str] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int, str]:
        self.words += command
        match command:
            case [_, "-m", "uv", *_]:
                name, output = "uv", ""
            case [*_, "config", "list"]:
                name, output = "config", ""
            case [*_, "uv"]:
                name, output = "get uv", ""
            case [_, "-m", "pip" | "compileall" as name, *_]:
                output = ""
            case _:
                name, output = "torch", self.cuda
        self.ran.append(name)
        return self.codes.get(name, 0), output


@pytest.mark.parametrize(
    ("codes", "cuda", "has_gpu", "variables", "ran", "code"),
    [
        ({}, "", False, {}, ["get uv", "config", "uv", "compileall", "torch"], 0),
        ({"compileall": 1}, "", False, {}, ["get uv", "config", "uv", "compileall", "torch"], 0),
        ({"get uv": 1}, "", False, {}, ["get uv", "pip", "torch"], 0),
        ({"uv": 2}, "", False, {}, ["get uv", "config", "uv", "pip", "torch"], 0),
        ({"uv": 2, "pip": 3}, "", False, {}, ["get uv", "config", "uv", "pip"], 3),
        ({"get uv": 1}, "13.0", False, {}, ["get uv", "pip", "torch"], 0),
        ({}, "13.0", False, {}, ["get uv", "config", "uv", "compileall", "torch"], 1),
        ({}, "13.0", True, {}, ["get uv", "config", "uv", "compileall", "torch"], 0),
        ({}, "13.0", False, {"MEGATRAIN_TORCH": "cuda"}, ["get uv", "config", "uv", "compileall", "torch"], 0),
        ({"torch": 1}, "", False, {}, ["get uv", "config", "uv", "compileall", "torch"], 1),
    ],
)
def test_pip_installs_where_uv_does_not(
    codes: dict[str, int], cuda: str, has_gpu: bool, variables: dict[str, str], ran: list[str], code: int
) -> None:
    commands = Commands(codes, cuda)
    assert install(commands, variables, has_gpu=has_gpu) == code
    assert commands.ran == ran
    assert ("--torch-backend=cpu" in commands.words) == ("uv" in ran and not has_gpu and not variables)


def test_reason_for_pip_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    install(Commands({"get uv": 1}, ""), {}, has_gpu=False)
    assert capsys.readouterr().err == "install.py: pip installs, because uv cannot be installed\n"
