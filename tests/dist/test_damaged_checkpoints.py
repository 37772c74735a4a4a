"""Checkpoints of several ranks: torch itself reads them, and damaged ones are named, skipped or refused."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_files import read_manifest, write_manifest
from megatrain.checkpoint_format.commit import write_commit
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.verifications import Verification, record_verifications
from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import bytes_text
from tests.dist.restarts import place, step_place, steps_that_are_whole, wait_for_the_end_of_writers
from tests.dist.training_jobs import SHALLOW, Arrays, Run, Tables, TrainingJobs, assert_bitwise
from tests.helpers.checkpoint_tree import manifest_path
from tests.helpers.rank_pool import RankPool
from tests.helpers.require import lazy_module
from tests.helpers.saved_checkpoint import Ckpt, ckpt_runner
from tests.helpers.train_command import run_command
from tests.helpers.training_case import make_config, on_layout

format_utils = lazy_module("torch.distributed.checkpoint.format_utils")

LAYOUT: Tables = {**on_layout(2, 1, 2), **SHALLOW}
STEPS = 4
FILE = "r000000-rank-00003.distcp"
METADATA = "r000000-metadata"
INDEX = "r000000-index.json"
MANIFEST = "r000000-manifest-"
KEYS = {"master": "model", "exp_avg": "optimizer.exp_avg", "exp_avg_sq": "optimizer.exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class Trained:
    """A job on four ranks, with the checkpoints of steps 2 and 4."""

    root: Path
    run: Run


@pytest.fixture(scope="module")
def trained(jobs: TrainingJobs, train_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    options: Tables = {"train": {"steps": STEPS}, "checkpoint": {"interval": 2}}
    run = jobs.run(make_config(train_data, LAYOUT, options, place(root)))
    wait_for_the_end_of_writers(root)
    assert steps_that_are_whole(root / "checkpoints") == [2, STEPS]
    return Trained(root, run)


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    return ckpt_runner(capsys)


@pytest.mark.slow
def test_torch_reads_the_state_that_four_ranks_wrote(
    trained: Trained, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    format_utils.dcp_to_torch_save(step_place(trained.root, STEPS), tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)

    shutil.copytree(trained.root / "checkpoints", tmp_path / "checkpoints")
    alone = jobs.run(make_config(train_data, SHALLOW, {"train": {"steps": STEPS}}, place(tmp_path)))
    for kind, prefix in KEYS.items():
        found: Arrays = {
            key.removeprefix(f"{prefix}."): tensor.numpy()
            for key, tensor in loaded.items()
            if key.startswith(f"{prefix}.")
        }
        assert_bitwise(found, alone.initial_state[kind])
        assert_bitwise(found, trained.run.final_state[kind])
    assert len(loaded) == sum(len(state) for state in alone.initial_state.values())


# Damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def become(directory: Path, **changes: str) -> None:
    """Turn an intact checkpoint into one of another job or branch."""
    location = LocalLocation(directory)
    manifest = replace(read_manifest(location), **changes)
    (directory / "COMMIT").unlink()
    write_manifest(location, manifest)
    write_commit(location, manifest)


def take_manifest_of(directory: Path, **changes: str) -> None:
    """Replace the manifest of a checkpoint by that of another one."""
    manifest = replace(read_manifest(LocalLocation(directory)), **changes)
    manifest_path(directory).write_text(manifest.to_json())


@dataclass(frozen=True, slots=True)
class Damage:
    """A kind of damage. `file`: the damaged file. `alone`: the message of a job that has no other checkpoint."""

    name: str
    do: Callable[[Path], None]
    file: str
    alone: str = ""
    is_loadable: bool = False

    def __str__(self) -> str:
        return self.name


NO_COMMITTED = "holds main/step-000000004, but no committed checkpoint"
DAMAGES = [
    Damage("flipped bit", lambda place: flip(place / FILE), FILE),
    Damage("cut short", lambda place: cut(place / FILE), FILE),
    Damage("missing file", lambda place: (place / FILE).unlink(), FILE),
    Damage("flipped bit in the index", lambda place: flip(place / INDEX), INDEX),
    Damage("missing index", lambda place: (place / INDEX).unlink(), INDEX),
    Damage("missing metadata", lambda place: (place / METADATA).unlink(), METADATA),
    Damage("flipped bit in the manifest", lambda place: flip(manifest_path(place)), MANIFEST, NO_COMMITTED),
    Damage("missing manifest", lambda place: manifest_path(place).unlink(), MANIFEST, NO_COMMITTED),
    Damage("missing COMMIT", lambda place: (place / "COMMIT").unlink(), "COMMIT", NO_COMMITTED),
    Damage("another run's manifest", lambda place: take_manifest_of(place, job="other"), MANIFEST, NO_COMMITTED),
    # An intact checkpoint may be loaded by its name, but a run does not resume from it as its own.
    Damage("of another run", lambda place: become(place, job="other"), MANIFEST, is_loadable=True),
    Damage("of another branch", lambda place: become(place, branch="branch-0002"), MANIFEST, is_loadable=True),
]


Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(rank_pool: RankPool, train_data: Tables, tmp_path: Path) -> Train:
    """Return a function that trains in a directory to the last step, on one rank, and returns the exit code and the
    output."""

    def run(directory: Path, **checkpoint: str) -> tuple[int, str]:
        directory.mkdir(exist_ok=True)
        options: Tables = {
            "train": {"steps": STEPS},
            "checkpoint": {**checkpoint, "interval": 100, "arena_directory": str(directory), "save_at_end": True},
        }
        config = make_config(train_data, SHALLOW, options, place(directory))
        (tmp_path / "config.toml").write_text(to_toml(config))
        code = run_command(rank_pool, ["train", str(tmp_path / "config.toml")], tmp_path / "said.txt")
        wait_for_the_end_of_writers(directory)
        return code, (tmp_path / "said.txt").read_text()

    return run


@pytest.mark.slow
def test_reported_checkpoint_size_is_its_size_in_storage(train: Train, ckpt: Ckpt, tmp_path: Path) -> None:
    code, said = train(tmp_path / "run")
    assert code == ExitCode.OK, said
    (saved,) = ckpt("ls", tmp_path / "run", "--json")["checkpoints"]
    assert f" are kept (checkpoint.keep_last), {bytes_text(saved['num_bytes'])} each" in said


@pytest.mark.slow
def test_checkpoint_verified_as_damaged_is_the_last_candidate(trained: Trained, train: Train, tmp_path: Path) -> None:
    for name, resumed in (("two", 2), ("one", STEPS)):
        run = tmp_path / name
        shutil.copytree(trained.root / "checkpoints", run / "checkpoints")
        found = Verification.of("main", STEPS, time.time(), ["a file is not as it was written"])
        record_verifications(LocalLocation(run / "checkpoints"), [found])
        if name == "one":
            shutil.rmtree(step_place(run, 2))
        code, said = train(run)
        assert code == ExitCode.OK, said
        assert f"resumed at step {resumed} from {step_place(run, resumed)} " in said
        warning = f"WARNING: {step_place(run, STEPS)} is damaged and was skipped: `megatrain ckpt verify` found"
        assert (warning in said) == (resumed == 2), said


@pytest.mark.slow(kept=["missing COMMIT"])
@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_checkpoint_is_named_skipped_or_refused(
    damage: Damage, trained: Trained, ckpt: Ckpt, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.root / "checkpoints", run / "checkpoints")
    victim = step_place(run, STEPS)
    damage.do(victim)
    culprit = str(victim / damage.file)

    (found,) = ckpt("verify", victim, "--job", "megatrain", "--json", code=int(ExitCode.CHECKPOINT))["checkpoints"]
    assert any(problem.startswith(culprit) for problem in found["problems"]), found

    # Each kind of file is in both of these cases once.
    if DAMAGES.index(damage) % 2 == 0:
        # named by checkpoint.load
        code, said = train(tmp_path / "loading", load=str(victim))
        assert code == (ExitCode.OK if damage.is_loadable else ExitCode.CHECKPOINT), said
        assert damage.is_loadable or culprit in said
    else:
        # without another checkpoint to resume from
        alone = tmp_path / "alone"
        shutil.copytree(run / "checkpoints", alone / "checkpoints")
        shutil.rmtree(step_place(alone, 2))
        code, said = train(alone)
        assert code == ExitCode.CHECKPOINT, said
        assert (damage.alone or str(step_place(alone, STEPS) / damage.file)) in said
    assert "Traceback" not in said

    # with an older checkpoint, on a new branch that leaves the damaged one in place
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    code, said = train(run)
    assert code == ExitCode.OK, said
    (warning,) = re.findall(r"WARNING: .*", said)
    assert warning.startswith(f"WARNING: {victim} is damaged and was skipped: ")
    assert culprit in warning
    assert f"resumed at step 2 from {step_place(run, 2)} " in said
    branch = list_branches(LocalLocation(run / "checkpoints"))[0]
    assert (branch.name, branch.parent, branch.parent_step) == ("branch-0002", "main", 2)
    assert steps_that_are_whole(run / "checkpoints", "branch-0002") == [STEPS]
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before
