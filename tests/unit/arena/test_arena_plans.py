"""host.json, plan-*.json and status.json: every field is required, no other field is allowed, files are replaced
whole."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.arena.plans import PLAN_SCHEMA_VERSION, HostPlan, ManifestTemplate, RankPlan, WriterStatus
from megatrain.checkpoint_format.manifest import CheckpointMesh, CheckpointVersions
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.layout import Layout
from tests.helpers.one_source import stream_of_one

HOST_PLAN = HostPlan(
    checkpoints="s3://bucket/run", job="demo", branch="branch-0002", round=3, host_index=1, num_hosts=4,
    ranks=(4, 5, 9), is_coordinator=False, num_slots=2, keep_last=3, keep_every=1000, keep_arena_s=1800.5,
    commit_timeout_s=600.0,
    manifest=ManifestTemplate(
        config={"model": {"hidden_size": 64}}, config_hash="abc",
        mesh=CheckpointMesh(Layout(tp_size=2, pp_size=2, dp_size=2), num_chunks=1),
        versions=CheckpointVersions(megatrain="0.1.0", torch="2.13.0", python="3.11.7"), has_optimizer=True,
        data=stream_of_one(num_tokens=1000, seed=7),
    ),
    tokenizer="tokenizer.json", claim="", began_at_step=0, is_exclusive=True,
)  # fmt: skip
RANK_PLAN = RankPlan(rank=5, image_bytes=256, plan_digest=bytes(range(32)), items=((0, 100), (128, 64), (192, 3)))
STATUS = WriterStatus(
    pid=4321, branch="main", round=3, num_persisted=7, num_failures=1, last_persisted_step=120, last_error="disk full",
    last_write_s=1.5, last_write_bytes=10**9,
)  # fmt: skip
ALL = (HOST_PLAN, RANK_PLAN, STATUS)


def test_plans_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with_empty_fields = (
        replace(STATUS, last_persisted_step=None, last_error=""),
        RankPlan(rank=0, image_bytes=0, plan_digest=bytes(32), items=()),
        replace(HOST_PLAN, tokenizer="", ranks=(0,), keep_arena_s=0.0),
    )
    for plan in (*ALL, *with_empty_fields):
        plan.write(path)
        assert type(plan).read(path) == plan
        assert json.loads(path.read_text())["schema_version"] == PLAN_SCHEMA_VERSION
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    for plan in ALL:
        with pytest.raises(CheckpointError, match=r"gone/p\.json: cannot be written: No such file or directory"):
            plan.write(tmp_path / "gone" / "p.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "p.json").mkdir()
    with pytest.raises(CheckpointError, match=r"p\.json: cannot be written: Is a directory"):
        STATUS.write(tmp_path / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_missing_plan_is_distinguished_from_a_damaged_one(tmp_path: Path) -> None:
    for plan in ALL:
        with pytest.raises(MissingFileError, match=r"p\.json: does not exist"):
            type(plan).read(tmp_path / "p.json")
        with pytest.raises(CheckpointError, match="cannot be read: Is a directory") as caught:
            type(plan).read(tmp_path)
        assert not isinstance(caught.value, MissingFileError)


@pytest.mark.parametrize("plan", ALL)
def test_missing_and_unknown_fields_are_refused(tmp_path: Path, plan: Any) -> None:
    path = tmp_path / "p.json"
    plan.write(path)
    raw = json.loads(path.read_text())
    for name in raw:
        path.write_text(json.dumps({key: value for key, value in raw.items() if key != name}))
        with pytest.raises(CheckpointError, match=rf"{path}: {name}( is missing|=None)"):
            type(plan).read(path)
        path.write_text(json.dumps({**raw, name: {"a": 1.5}}))
        with pytest.raises(CheckpointError, match=rf"{path}: {name}"):
            type(plan).read(path)
    path.write_text(json.dumps({**raw, "extra": 1}))
    with pytest.raises(
        CheckpointError, match=f"{path}: extra=1; no such field in schema version {PLAN_SCHEMA_VERSION}"
    ):
        type(plan).read(path)


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (HOST_PLAN, {"schema_version": 1}, "schema_version=1, this program reads 2"),
        (HOST_PLAN, {"host_index": 4}, "host_index=4; expected less than num_hosts=4"),
        (HOST_PLAN, {"num_hosts": 0}, "num_hosts=0; expected an integer of at least 1"),
        (HOST_PLAN, {"num_slots": 3}, "num_slots=3; expected at most 2"),
        (HOST_PLAN, {"num_slots": 0}, "num_slots=0; expected an integer of at least 1"),
        (HOST_PLAN, {"ranks": []}, r"ranks=\[\]; expected a list of ranks, ascending, at least one"),
        (HOST_PLAN, {"ranks": [5, 4]}, r"ranks=\[5, 4\]; expected a list of ranks, ascending"),
        (HOST_PLAN, {"ranks": [4, 4]}, r"ranks=\[4, 4\]; expected"),
        (HOST_PLAN, {"ranks": [-1, 4]}, r"ranks=\[-1, 4\]; expected"),
        (HOST_PLAN, {"ranks": [True]}, r"ranks=\[True\]; expected"),
        (HOST_PLAN, {"is_coordinator": 1}, "is_coordinator=1; expected true or false"),
        (HOST_PLAN, {"keep_arena_s": -1}, "keep_arena_s=-1; expected a number of seconds"),
        (HOST_PLAN, {"manifest": {"more": 1}}, r"manifest\.more=1; no such field"),
        (HOST_PLAN, {"manifest": {}}, r"manifest\.mesh is missing; expected an object"),
        (RANK_PLAN, {"items": [[0, 100], [100, 5]]}, "items has an item of 5 bytes at 100, expected at least 1"),
        (RANK_PLAN, {"items": [[0, 300]]}, "items has an item that ends at 300, after the image's 256 bytes"),
        (RANK_PLAN, {"items": [[0, 1, 2]]}, r"items=\[\[0, 1, 2\]\]; expected a list of \[offset, length\]"),
        (RANK_PLAN, {"items": [[0, 1.5]]}, r"expected a list of \[offset, length\]"),
        (RANK_PLAN, {"items": [3]}, r"expected a list of \[offset, length\]"),
        (RANK_PLAN, {"plan_digest": "00"}, "plan_digest='00'; expected 64 hexadecimal digits"),
        (RANK_PLAN, {"plan_digest": "AB" * 32}, "expected 64 hexadecimal digits"),
        (RANK_PLAN, {"plan_digest": "xy" * 32}, "expected 64 hexadecimal digits"),
        (STATUS, {"pid": 0}, "pid=0; expected an integer of at least 1"),
        (STATUS, {"last_persisted_step": -1}, "last_persisted_step=-1; expected an integer"),
        (STATUS, {"last_error": None}, "last_error=None; expected a string"),
    ],
)
def test_invalid_field_is_named(tmp_path: Path, plan: Any, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    plan.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=f"{path}: .*{message}"):
        type(plan).read(path)


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": true}'])
def test_damaged_plan_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    for plan in ALL:
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            type(plan).read(path)
