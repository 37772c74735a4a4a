"""Branches of a run's checkpoints: the record in each branch's file BRANCH, and the branch's origin.

The file is written once, atomically. lineage.py decides which branch a run resumes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from itertools import count

from megatrain.checkpoint_format.location import Location, put_once
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.json_object import JsonObject

BRANCH_NAME = "BRANCH"
MAIN_BRANCH = "main"
SCHEMA_VERSION = 1
_NAME = re.compile(r"(?!step-)[a-z0-9][a-z0-9-]{0,62}")
_NAME_RULE = "expected a branch name: a-z, 0-9 and -, at most 63 of them, not beginning with - or step-"
_NUMBERED = re.compile(r"branch-([0-9]{4,18})")


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of checkpoints. It begins at `parent_step` of `parent`; a run's first branch has neither ("" and None).

    A branch at step 0 of its parent may begin with initial weights. `rollback`: the incident that made the job go back.
    `data`: the sample order at the start of the branch, if this order leaves out samples; their numbers refer to it.
    """

    name: str
    parent: str
    parent_step: int | None
    created_unix_s: float
    reason: str
    rollback: str = ""
    data: SampleStream | None = None


def read_branch(checkpoints: Location, name: str) -> Branch:
    """Return the record in a branch's BRANCH file.

    Raises: MissingFileError when there is no such branch; CheckpointError when its BRANCH file is damaged or names
    another branch.
    """
    if not is_branch_name(name):
        raise CheckpointError(f"{checkpoints}: branch {name!r}; {_NAME_RULE}")
    location = checkpoints / name / BRANCH_NAME
    try:
        content = location.read()
    except MissingFileError as error:
        listed = ", ".join(branch_names(checkpoints)) or "none"
        raise MissingFileError(f"{location} is missing, so {name} is no branch (there are: {listed})") from error
    reader = JsonObject.parse(content, str(location), SCHEMA_VERSION, _repair_hint(name))
    reader.check_names(Branch, "schema_version")
    if reader.text("name") != name:
        raise reader.error(
            "name", f"but the directory is {name}; it was renamed or copied: move it out of {checkpoints}"
        )
    is_first = reader.text("parent") == ""
    if is_first and not reader.is_null("parent_step"):
        raise reader.error("parent_step", "expected null, because parent is empty")
    return Branch(
        name=name,
        parent="" if is_first else branch_name_of(reader, "parent"),
        parent_step=None if is_first else reader.count("parent_step"),
        created_unix_s=reader.seconds("created_unix_s"),
        reason=reader.text("reason"),
        rollback=reader.text("rollback") if "rollback" in reader else "",
        data=SampleStream.read(reader.section("data")) if "data" in reader else None,
    )


def _repair_hint(name: str) -> str:
    first = Branch(name, "", None, 0.0, "written again")
    parent = "" if name == MAIN_BRANCH else ", with the branch and step that it began at as parent and parent_step"
    return f"it must contain the origin of {name}: write it again as {_text_of(first).strip()}{parent}"


def list_branches(checkpoints: Location) -> list[Branch]:
    """Return all branches, by name. A directory without a BRANCH file is not a branch.

    Raises: CheckpointError when a BRANCH file is damaged.
    """
    return [read_branch(checkpoints, name) for name in branch_names(checkpoints)]


def ancestry(checkpoints: Location, branch: str) -> list[Branch]:
    """Return a branch, its parent, and so on. The ancestry ends early at a parent that was removed.

    Raises: MissingFileError when there is no such branch; CheckpointError when a BRANCH file of the ancestry is
    damaged, or when the parents form a cycle.
    """
    branches = [read_branch(checkpoints, branch)]
    while branches[-1].parent:
        seen = [member.name for member in branches]
        if branches[-1].parent in seen:
            cycle = " -> ".join([*seen, branches[-1].parent])
            raise CheckpointError(
                f"{checkpoints / branches[-1].name / BRANCH_NAME}: the parents form a cycle ({cycle}); "
                "correct one of them"
            )
        try:
            branches.append(read_branch(checkpoints, branches[-1].parent))
        except MissingFileError:
            break
    return branches


def write_branch(checkpoints: Location, branch: Branch) -> bool:
    """Write a branch's BRANCH file. Returns False when another process took the name; always True for the first branch.

    Raises: CheckpointError.
    """
    location = checkpoints / branch.name / BRANCH_NAME
    return put_once(location, _text_of(branch).encode()) or not branch.parent


def _text_of(branch: Branch) -> str:
    content = {"schema_version": SCHEMA_VERSION, **asdict(branch)}
    # without a value, these two fields are left out
    if not branch.rollback:
        del content["rollback"]
    if branch.data is None:
        del content["data"]
    return json.dumps(content, sort_keys=True) + "\n"


def is_branch_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def branch_names(checkpoints: Location) -> list[str]:
    """Return the names of all branches: the directories that hold a BRANCH file."""
    return [
        entry.name for entry in checkpoints.entries() if is_branch_name(entry.name) and (entry / BRANCH_NAME).exists()
    ]


def branch_name_of(reader: JsonObject, field: str) -> str:
    """Return the branch name in a field. Raises: CheckpointError when it is not a valid branch name."""
    name = reader.text(field)
    if not is_branch_name(name):
        raise reader.error(field, _NAME_RULE)
    return name


def next_branch_name(checkpoints: Location) -> str:
    """Return the first free name after all existing ones, including those of branches that were not fully opened."""
    taken = {entry.name for entry in checkpoints.entries()}
    number = max((int(match[1]) for name in taken if (match := _NUMBERED.fullmatch(name))), default=1)
    return next(name for i in count(number + 1) if (name := f"branch-{i:04d}") not in taken)
