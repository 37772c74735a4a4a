"""`make venv` passes pip's configuration to uv, and selects a build of torch that the machine can get."""

from __future__ import annotations

from pathlib import Path

from install import cpu_wheels, pip_options, uv_arguments, uv_environment

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
