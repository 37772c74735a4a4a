"""`megatrain ckpt ls DIR`: list branches and checkpoints, and mark the one from which a job would resume."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatrain.checkpoint.find import resolve_location
from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint, Survey, survey
from megatrain.checkpoint_format.branches import Branch
from megatrain.commands.argument_types import Verbs, add_json
from megatrain.commands.checkpoint_choice import add_run
from megatrain.commands.printing import print_result, table
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import age_text, bytes_text

_COLUMNS = ("", "step", "state", "age", "size", "tokens", "round", "")


def add_verb(verbs: Verbs) -> None:
    parser = verbs.add_parser("ls", help="list the branches and checkpoints of a run", allow_abbrev=False)
    add_run(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run)


def run(args: argparse.Namespace) -> int:
    """Print the list. Raises: CheckpointError when DIR holds no checkpoints or a branch is damaged."""
    resolved = resolve_location(args.location)
    if resolved.checkpoints is None:
        raise CheckpointError(f"{resolved.checkpoint} is one checkpoint outside of a run; use `megatrain ckpt inspect`")
    found = survey(resolved.checkpoints)
    step = None if resolved.checkpoint is None else resolved.checkpoint.name
    branches = [branch for branch in found.branches if resolved.branch in (None, branch.name)]
    of_branch = [checkpoint for checkpoint in found.checkpoints if resolved.branch in (None, checkpoint.branch)]
    shown = [checkpoint for checkpoint in of_branch if step in (None, checkpoint.location.name)]
    listed = str(resolved.checkpoints), found, branches, shown
    print_result(lambda: _document(*listed), lambda: _lines(*listed), is_json=args.is_json)
    return int(ExitCode.OK)


def _document(
    location: str, found: Survey, branches: Sequence[Branch], shown: Sequence[FoundCheckpoint]
) -> dict[str, Any]:
    resume = found.resume.candidate
    return {
        "place": location,
        "current_branch": found.current,
        "resume": {
            "branch": None if resume is None else resume.branch,
            "step": None if resume is None else resume.step,
            "place": None if resume is None else str(resume.location),
            "reason": found.resume.reason,
            "skipped": list(found.resume.skipped),
        },
        "branches": [{**asdict(branch), "is_current": branch.name == found.current} for branch in branches],
        "checkpoints": [_entry(found, checkpoint) for checkpoint in shown],
    }


def _entry(found: Survey, checkpoint: FoundCheckpoint) -> dict[str, Any]:
    return {
        "branch": checkpoint.branch,
        "step": checkpoint.step,
        "place": str(checkpoint.location),
        "state": checkpoint.state.value,
        "is_in_line": checkpoint.is_in_ancestry,
        "is_resume_point": _is_resume_point(found, checkpoint),
        "num_bytes": checkpoint.num_bytes,
        "written_unix_s": checkpoint.written_unix_s,
        "consumed_tokens": checkpoint.consumed_tokens,
        "round": checkpoint.round,
        "pin_reason": checkpoint.pin_reason,
        "problem": checkpoint.problem,
        "verification": None if checkpoint.verification is None else asdict(checkpoint.verification),
    }


def _is_resume_point(found: Survey, checkpoint: FoundCheckpoint) -> bool:
    resume = found.resume.candidate
    return resume is not None and (resume.branch, resume.step) == (checkpoint.branch, checkpoint.step)


def _lines(location: str, found: Survey, branches: Sequence[Branch], shown: Sequence[FoundCheckpoint]) -> list[str]:
    lines = [location]
    for branch in branches:
        lines += ["", _branch_line(branch, is_current=branch.name == found.current)]
        rows = [_row(found, checkpoint) for checkpoint in shown if checkpoint.branch == branch.name]
        lines += table([_COLUMNS, *rows], left=(0, 2, 7)) if rows else ["   nothing saved yet"]
    lines.append("")
    resume = found.resume
    if resume.candidate is None:
        lines.append(f"a job starts without a checkpoint: {resume.reason}")
    else:
        at = f"{resume.candidate.branch}/{resume.candidate.location.name}"
        lines.append(f"-> a job resumes from {at}: {resume.reason}")
    return [*lines, *resume.skipped]


def _branch_line(branch: Branch, *, is_current: bool) -> str:
    origin = f"from step {branch.parent_step} of {branch.parent}, " if branch.parent else ""
    current = " (current)" if is_current else ""
    return f"{branch.name}{current}: {origin}opened {age_text(branch.created_unix_s, time.time())} ago: {branch.reason}"


def _row(found: Survey, checkpoint: FoundCheckpoint) -> tuple[str, ...]:
    # without a current branch, no checkpoint is known to be abandoned
    is_abandoned = (
        found.current is not None
        and not checkpoint.is_in_ancestry
        and checkpoint.state in (CheckpointState.COMMITTED, CheckpointState.PINNED)
    )
    remarks = [
        "abandoned" if is_abandoned else "",
        f"pinned: {checkpoint.pin_reason}" if checkpoint.pin_reason else "",
        checkpoint.problem or "",
        "" if checkpoint.verification is None else checkpoint.verification.problem,
    ]
    return (
        "->" if _is_resume_point(found, checkpoint) else "",
        str(checkpoint.step),
        checkpoint.state.value,
        "-" if checkpoint.written_unix_s is None else age_text(checkpoint.written_unix_s, time.time()),
        bytes_text(checkpoint.num_bytes),
        "-" if checkpoint.consumed_tokens is None else f"{checkpoint.consumed_tokens:,}",
        "-" if checkpoint.round is None else str(checkpoint.round),
        "; ".join(remark for remark in remarks if remark),
    )
