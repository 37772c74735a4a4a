"""Checkpoints without tensors: the files that the contracts define, with minimal content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatrain.checkpoint_format.checkpoint_files import manifest_location, write_manifest
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.claims import Claims
from megatrain.checkpoint_format.commit import write_commit
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointMesh, CheckpointVersions, FileEntry, Manifest
from megatrain.checkpoint_format.round_starts import RoundStart, begin_round
from megatrain.contracts.layout import Layout
from tests.helpers.forked_program import run_forked
from tests.helpers.one_source import stream_of_one


def make_manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "job": "demo", "branch": "main", "round": 2, "step": 120, "consumed_samples": 3840, "consumed_tokens": 983_040,
        "num_updates": 118, "num_skipped": 2, "written_unix_s": 1_790_000_000.5, "has_optimizer": True,
        "data": stream_of_one(num_tokens=100_000, seed=1234),
        "mesh": CheckpointMesh(Layout(tp_size=2, pp_size=2, dp_size=2), num_chunks=2), "config_hash": "abc123",
        "config": {"model": {"hidden_size": 64}, "profile": {"ranks": (0, 1)}},
        "versions": CheckpointVersions(megatrain="0.1.0", torch="2.13.0", python="3.11.7"),
        "files": {
            "r000002-rank-00000.distcp": FileEntry(10, "items-sha256:" + "0a" * 32),
            "more/0.bin": FileEntry(0, "sha256:" + "1b" * 32),
        },
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def put_manifest(branch: Location, step: int, **changes: Any) -> Location:
    """Create a checkpoint without COMMIT and return its directory."""
    directory = branch / step_directory_name(step)
    write_manifest(directory, make_manifest(branch=branch.name, step=step, **changes))
    return directory


def put_checkpoint(branch: Location, step: int, **changes: Any) -> Location:
    """Create a committed checkpoint and return its directory."""
    directory = put_manifest(branch, step, **changes)
    write_commit(directory, make_manifest(branch=branch.name, step=step, **changes))
    return directory


def put_branch(
    checkpoints: Location, name: str, parent: str = "", parent_step: int | None = None, reason: str = "test"
) -> Location:
    """Create the BRANCH file of a branch and return its directory."""
    content = {
        "schema_version": 1, "name": name, "parent": parent, "parent_step": parent_step,
        "created_unix_s": 1_790_000_000, "reason": reason,
    }  # fmt: skip
    (checkpoints / name / "BRANCH").write(json.dumps(content).encode())
    return checkpoints / name


def go_back(checkpoints: Location, step: int, reason: str) -> None:
    """Continue from a step of main on branch-0002."""
    put_branch(checkpoints, "branch-0002", "main", step, reason)
    put_resume(checkpoints, "branch-0002")


def put_resume(checkpoints: Location, branch: str) -> None:
    """Claim the next round, and record that it continues a branch."""
    claim = Claims(checkpoints).take(None)
    begin_round(checkpoints, RoundStart(claim.number, branch, None))


def put_main(checkpoints: Location, *steps: int) -> Location:
    """Create a run on main with some committed steps."""
    put_resume(checkpoints, "main")
    main = put_branch(checkpoints, "main")
    for step in steps:
        put_checkpoint(main, step)
    return main


def tree(place: Path) -> dict[str, bytes]:
    """Return all files below a location."""
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def manifest_path(directory: Path) -> Path:
    """Return the manifest of a checkpoint."""
    return path_of(manifest_location(LocalLocation(directory)))


def path_of(place: Location) -> Path:
    return Path(str(place))


def found(checkpoints: Location, branch: str | None = None) -> list[tuple[str, int]]:
    """Return branch and step of the checkpoints that a run may resume from, and check their locations."""
    result = candidates(checkpoints, branch)
    for candidate in result:
        assert str(candidate.location) == f"{checkpoints}/{candidate.branch}/step-{candidate.step:09d}"
    return [(candidate.branch, candidate.step) for candidate in result]


CRASHED = 9
"""The exit code of a process that `crash_at` ended."""

_CRASH = """
import os, sys
left = [{number}]

def crash(event, arguments):
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
    if not changes and not (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    if left[0] == 0:
        os._exit({crashed})
    left[0] -= 1

{preparation}
sys.addaudithook(crash)
{action}
"""


def crash_at(number: int, preparation: str, action: str) -> bool:
    """Run `action` in a process that ends just before its change `number` to the disk, as SIGKILL would end it.

    Return whether it reached that change; False if the action ended before.
    """
    script = _CRASH.format(number=number, crashed=CRASHED, preparation=preparation, action=action)
    done = run_forked(["-c", script])
    assert done.returncode in (0, CRASHED), done.stderr
    return done.returncode == CRASHED
