"""Checkpoint directories: names, manifest, commit, and which one is the newest."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.checkpoint_files import (
    CheckpointMesh,
    CheckpointVersions,
    Manifest,
    committed_steps,
    is_committed,
    newest_committed,
    read_manifest,
    step_directory_name,
    step_of,
    write_commit,
    write_manifest,
    wrong_files,
)
from megatrain.contracts.errors import CheckpointError


def make_manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "job": "demo",
        "branch": "main",
        "incarnation": 2,
        "step": 120,
        "consumed_samples": 3840,
        "consumed_tokens": 983_040,
        "num_updates": 118,
        "num_skipped": 2,
        "mesh": CheckpointMesh(tp_size=2, pp_size=2, dp_size=2, num_chunks=2),
        "config_hash": "abc123",
        "config": {"model": {"hidden_size": 64}, "profile": {"ranks": [0, 1]}},
        "versions": CheckpointVersions(megatrain="0.1.0", torch="2.13.0", python="3.11.7"),
        "files": {"__0_0.distcp": 10, "optimizer/0.bin": 0},
    }
    return Manifest(**{**values, **changes})


def save(checkpoints: Path, step: int, **changes: Any) -> Path:
    directory = checkpoints / step_directory_name(step)
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(directory, make_manifest(step=step, **changes))
    return directory


def test_names_sort_as_steps_do() -> None:
    assert step_directory_name(120) == "step-000000120"
    steps = [0, 9, 10, 999_999_999]
    assert sorted(map(step_directory_name, steps)) == list(map(step_directory_name, steps))
    assert [step_of(Path(step_directory_name(step))) for step in steps] == steps
    for name in ("step-120", "step-0000000120", "step-00000012x", "latest", "xstep-000000120", "step-000000120.tmp"):
        assert step_of(Path(name)) is None
    with pytest.raises(ValueError, match="negative"):
        step_directory_name(-1)


def test_manifest_round_trip() -> None:
    manifest = make_manifest()
    assert Manifest.from_json(manifest.to_json(), "m") == manifest
    assert json.loads(manifest.to_json())["schema_version"] == 1


def spoiled(path: str, value: Any) -> str:
    """Return the manifest with the field at a dotted path changed, or taken away with `...`."""
    raw = json.loads(make_manifest().to_json())
    *parents, last = path.split("/")
    place = raw
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"m\.json: not JSON"),
        ("[" * 100_000, r"m\.json: not JSON"),
        ("[]", r"m\.json: a list, expected a JSON object"),
        (spoiled("schema_version", 2), r"m\.json: schema_version=2, this program reads 1"),
        (spoiled("schema_version", True), r"schema_version=True"),
        (spoiled("step", ...), r"m\.json: step is missing; expected an integer of at least 0"),
        (spoiled("step", -1), r"step=-1; expected an integer"),
        (spoiled("step", True), r"step=True; expected an integer"),
        (spoiled("consumed_tokens", 1.5), r"consumed_tokens=1\.5; expected an integer"),
        (spoiled("job", None), r"job=None; expected a string"),
        (spoiled("config", []), r"config=\[\]; expected an object"),
        (spoiled("mesh", 3), r"mesh=3; expected an object"),
        (spoiled("mesh/tp_size", 0), r"mesh\.tp_size=0; expected an integer of at least 1"),
        (spoiled("mesh/cp_size", 1), r"mesh\.cp_size=1; no such field in schema version 1"),
        (spoiled("versions/torch", ...), r"versions\.torch is missing; expected a string"),
        (spoiled("loss", 1), r"loss=1; no such field in schema version 1"),
        (spoiled("files/a.bin", "10"), r"files\.a\.bin='10'; expected an integer"),
        (
            json.dumps({**json.loads(make_manifest().to_json()), "files": {"../x": 1}}),
            r"files\.\.\./x=1; expected a path",
        ),
        (json.dumps({**json.loads(make_manifest().to_json()), "files": {"/x": 1}}), r"files\./x=1; expected a path"),
    ],
)
def test_a_wrong_manifest_names_file_and_field(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(text, "m.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [field.name for field in dataclasses.fields(Manifest)]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_random_fields_are_accepted_or_refused_with_the_right_error(changes: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(make_manifest().to_json()), **changes})
    message = "m.json"
    try:
        Manifest.from_json(text, "m.json")
    except CheckpointError as error:
        message = str(error)
    assert "m.json" in message


def test_a_manifest_on_disk(tmp_path: Path) -> None:
    directory = save(tmp_path, 120)
    assert read_manifest(directory) == make_manifest()
    directory.rename(tmp_path / step_directory_name(121))
    with pytest.raises(CheckpointError, match=r"step=120, but the directory is step-000000121; it was renamed"):
        read_manifest(tmp_path / step_directory_name(121))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: No such file or directory; the checkpoint is incomplete"
    ):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        read_manifest(tmp_path)


def test_wrong_files_are_all_listed(tmp_path: Path) -> None:
    directory = save(tmp_path, 120)
    (directory / "__0_0.distcp").write_bytes(b"short")
    assert [problem.removeprefix(str(directory)) for problem in wrong_files(directory, make_manifest())] == [
        "/__0_0.distcp: 5 bytes, expected 10",
        "/optimizer/0.bin: No such file or directory, expected 0 bytes",
    ]
    (directory / "__0_0.distcp").write_bytes(b"0123456789")
    (directory / "optimizer").mkdir()
    (directory / "optimizer" / "0.bin").write_bytes(b"")
    assert wrong_files(directory, make_manifest()) == []


def test_commit(tmp_path: Path) -> None:
    directory = save(tmp_path, 120)
    assert not is_committed(directory)
    write_commit(directory)
    assert is_committed(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["COMMIT", "manifest.json"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"schema_version": 1, "step": "x"}', b"\xff"])
def test_a_commit_file_that_is_none_commits_nothing(tmp_path: Path, damage: bytes) -> None:
    directory = save(tmp_path, 120)
    write_commit(directory)
    (directory / "COMMIT").write_bytes(damage)
    assert not is_committed(directory)


def test_a_commit_vouches_for_one_manifest(tmp_path: Path) -> None:
    directory = save(tmp_path, 120)
    write_commit(directory)
    write_manifest(directory, make_manifest(consumed_samples=1))
    assert not is_committed(directory)
    (directory / "manifest.json").unlink()
    assert not is_committed(directory)


def test_commit_needs_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: No such file"):
        write_commit(tmp_path)


def test_an_older_round_cannot_commit_over_a_newer_one(tmp_path: Path) -> None:
    directory = save(tmp_path, 120, incarnation=5)
    write_commit(directory)
    write_commit(directory)
    write_manifest(directory, make_manifest(incarnation=4))
    with pytest.raises(CheckpointError, match="committed by round 5, and round 4 is older"):
        write_commit(directory)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_commit_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    directory = save(tmp_path, 120)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "replace": (Path, "replace", fail)}[failing])
    with pytest.raises(CheckpointError, match=r"COMMIT: cannot be written: No space left on device"):
        write_commit(directory)
    assert [path.name for path in directory.iterdir()] == ["manifest.json"]


def test_file_and_directory_reach_the_disk_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, 120)
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(file: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        real_fsync(file)

    def replace(self: Path, target: Path) -> Path:
        calls.append("rename " + target.name)
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_commit(directory)
    assert calls == [f"fsync .COMMIT.{os.getpid()}.tmp", "rename COMMIT", "fsync step-000000120"]


def test_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    assert newest_committed(checkpoints) is None
    checkpoints.mkdir()
    assert newest_committed(checkpoints) is None
    for step in (10, 20, 9):
        write_commit(save(checkpoints, step))
    save(checkpoints, 30)
    (checkpoints / "notes.txt").write_text("x")
    assert committed_steps(checkpoints) == [9, 10, 20]
    assert newest_committed(checkpoints) == checkpoints / "step-000000020"


def test_a_directory_with_nothing_committed_is_never_a_start_from_scratch(tmp_path: Path) -> None:
    save(tmp_path, 30)
    assert committed_steps(tmp_path) == []
    with pytest.raises(
        CheckpointError, match=r"holds step-000000030, but no committed checkpoint .*remove it to start"
    ):
        newest_committed(tmp_path)
    for number in range(6):
        (tmp_path / f"a{number}").touch()
    with pytest.raises(CheckpointError, match=r"holds a0, a1, a2, a3, a4 and more"):
        newest_committed(tmp_path)


def test_a_path_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot list checkpoints: Not a directory"):
        newest_committed(tmp_path / "file")
