"""The subcommands of `megatrain data pictures` as a user sees them."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.commands import data
from megatrain.contracts.errors import DataError
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.producer_secret import read_secret
from megatrain.peers.link import SECRET_BYTES
from megatrain.peers.server import listen
from tests.helpers.drawn_pictures import drawn, encoded, resized, write_pictures, write_shard
from tests.helpers.pillow_producer import SECRET, PillowDecoder, producers_in_threads
from tests.helpers.processes import descendants, is_running
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(["pictures", *map(str, arguments)]))


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def secret_file(directory: Path, content: bytes = bytes(SECRET_BYTES), mode: int = 0o600) -> Path:
    path = directory / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_index_and_verify_state_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path, 2, 3)
    write_shard(tmp_path / "shard-2.tar", {"a.jpg": encoded(drawn(9, 9)), "b.txt": b""})
    assert run("index", tmp_path) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'pictures.index'}: 7 samples of 3 shards\n"
    assert f"{tmp_path / 'shard-2.tar'}: captions without a picture: 1; pictures without a caption: 1" in err

    code, built = answer(capsys, "index", tmp_path, "--force")
    assert (code, built["samples"], built["shards"][2]["num_without_caption"]) == (0, 7, 1)
    assert built["shards"][0]["sha256"] == hashlib.sha256((tmp_path / "shard-0.tar").read_bytes()).hexdigest()

    code, verified = answer(capsys, "verify", tmp_path)
    assert (code, verified["is_sound"]) == (65, False)
    assert [(Path(one["shard"]).name, one["member"]) for one in verified["problems"]] == [
        ("shard-2.tar", ""), ("shard-2.tar", "a.jpg"),
    ]  # fmt: skip
    assert run("verify", tmp_path) == 65
    assert "a.jpg: it has no caption" in capsys.readouterr().out


def test_sample_asks_the_producers_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_pictures(tmp_path, 1, 4)
    run("index", tmp_path)
    with producers_in_threads([PictureIndex(tmp_path)], PillowDecoder()) as producers:
        at = ("--at", str(producers.addresses[0]), "--secret", secret_file(tmp_path, SECRET))
        code, found = answer(capsys, "sample", tmp_path, *at, "--size", 32, "--patch", 32, "--first", 2, "--count", 9)
        assert run("sample", tmp_path, *at, "--count", 1) == 0
    assert (code, found["shape"]) == (0, [1, 32 * 32 * 3])
    assert [(sample["number"], sample["caption"], sample["sha256"]) for sample in found["samples"]] == [
        (number, f"picture {number}", hashlib.sha256(resized(files[number], 32).tobytes()).hexdigest())
        for number in (2, 3)
    ]
    assert capsys.readouterr().out.endswith(": picture 0\n")


@pytest.mark.slow
def test_serve_answers_until_it_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_pictures(tmp_path, 1, 4)
    run("index", tmp_path)
    with listen("127.0.0.1") as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    secret = str(secret_file(tmp_path))
    command = [sys.executable, "-m", "megatrain", "data", "pictures", "serve", str(tmp_path), "--listen", at]
    command += ["--secret", secret, "--decoder", "pillow"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"serves 4 samples of {tmp_path} at {at}\n"
        _, found = answer(capsys, "sample", tmp_path, "--at", at, "--secret", secret, "--size", 32, "--patch", 16)
        started = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert [sample["caption"] for sample in found["samples"]] == [f"picture {number}" for number in range(3)]
    assert found["samples"][0]["mean"] == pytest.approx(resized(files[0], 32).mean(), abs=1e-3)
    assert len(started) == 1
    assert not is_running(started[0])


@pytest.mark.parametrize(
    "arguments",
    [("--at", "127.0.0.1:99"), ("--secret", "file"), ("--at", "nowhere", "--secret", "file"), ("--at", "h:0")],
)
def test_sample_refuses_producers_that_are_half_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("sample", tmp_path, *arguments)


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (bytes(SECRET_BYTES), 0o644, "has mode 0644: others may read the secret"),
        (bytes(5), 0o600, "a secret has 32 bytes"),
        (bytes(33), 0o600, "a secret has 32 bytes"),
    ],
)
def test_secret_that_is_none_is_refused(content: bytes, mode: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"make one: `\(umask 077; head -c 32 /dev/urandom") as raised:
        read_secret(secret_file(tmp_path, content, mode))
    assert reason in str(raised.value)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="is a symbolic link"):
        read_secret(tmp_path / "link")
