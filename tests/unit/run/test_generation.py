"""Choosing tokens: greedy, temperature, top-k and top-p against what the rules say; finding a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.lineage import open_branch
from megatrain.contracts.location import LocalLocation
from megatrain.generation import Sampling, choose_token, find_checkpoint
from tests.helpers.checkpoint_tree import put_checkpoint, put_main, put_manifest

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))


def drawn(sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """Return how often each token was drawn, as a fraction."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor([choose_token(LOGITS, sampling, generator) for _ in range(count)])
    return torch.bincount(tokens, minlength=4) / count


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(Sampling(temperature=0.0), 10).tolist() == [0, 1, 0, 0]


def test_draws_follow_the_probabilities() -> None:
    # 4000 draws: three standard deviations of a fraction are below 0.024
    assert torch.allclose(drawn(Sampling(temperature=1.0)), LOGITS.exp().float(), atol=0.024)


def test_low_temperature_sharpens() -> None:
    expected = torch.tensor([0.01, 0.16, 0.04, 0.09]) / 0.3
    assert torch.allclose(drawn(Sampling(temperature=0.5)), expected, atol=0.024)


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])
    assert torch.allclose(drawn(Sampling(temperature=1.0, top_k=2)), expected, atol=0.024)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    fractions = drawn(Sampling(temperature=1.0, top_p=0.65))  # 0.4 + 0.3 reach it
    assert torch.allclose(fractions, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]), atol=0.024)
    assert drawn(Sampling(temperature=1.0, top_p=0.05), 20).tolist() == [0, 1, 0, 0]


def test_top_p_needs_no_token_past_a_set_that_reaches_it_exactly() -> None:
    uniform = torch.zeros(4)  # probabilities of exactly a quarter
    generator = torch.Generator().manual_seed(3)
    assert len({choose_token(uniform, Sampling(top_p=0.5), generator) for _ in range(100)}) == 2


def test_top_k_above_the_vocabulary_cuts_nothing() -> None:
    fractions = drawn(Sampling(temperature=1.0, top_k=10))
    assert torch.allclose(fractions, LOGITS.exp().float(), atol=0.024)


def test_the_logits_are_left_alone() -> None:
    before = LOGITS.clone()
    choose_token(LOGITS, Sampling(top_k=1, top_p=0.5), torch.Generator())
    assert torch.equal(LOGITS, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that went back from step 30 to step 20, and has saved step 25 since."""
    checkpoints = LocalLocation(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    put_main(checkpoints, 10, 20, 30)
    open_branch(checkpoints, "main", 20, "back")
    put_checkpoint(checkpoints / "branch-0002", 25)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "branch-0002/step-000000025"),
        ("checkpoints", "branch-0002/step-000000025"),
        ("checkpoints/branch-0002", "branch-0002/step-000000025"),
        ("checkpoints/main", "main/step-000000030"),
        ("checkpoints/main/step-000000010", "main/step-000000010"),
    ],
)
def test_a_checkpoint_is_found_by_any_directory_above_it(
    name: str, expected: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_checkpoint(run / name).resolve() == run / "checkpoints" / expected
    monkeypatch.chdir(run / name)
    assert find_checkpoint(Path()).resolve() == run / "checkpoints" / expected


def test_a_branch_without_checkpoints_of_its_own_means_its_origin(run: Path) -> None:
    LocalLocation(run / "checkpoints/branch-0002/step-000000025").remove()
    for name in ("", "checkpoints/branch-0002"):
        assert find_checkpoint(run / name) == run / "checkpoints/main/step-000000020"


@pytest.mark.parametrize("content", ["", "notes.txt", "checkpoints/notes.txt"])
def test_a_path_without_checkpoints_is_refused(content: str, tmp_path: Path) -> None:
    if content:
        LocalLocation(tmp_path / content).write(b"")
    with pytest.raises(CheckpointError, match="is no checkpoint and holds none"):
        find_checkpoint(tmp_path)


def test_a_run_before_its_first_checkpoint_is_refused(tmp_path: Path) -> None:
    put_main(LocalLocation(tmp_path / "checkpoints"))
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "main"):
        with pytest.raises(CheckpointError, match="is no checkpoint and holds none"):
            find_checkpoint(path)


def test_uncommitted_checkpoints_are_refused(tmp_path: Path) -> None:
    put_manifest(put_main(LocalLocation(tmp_path / "checkpoints")), 10)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "main"):
        with pytest.raises(CheckpointError, match=r"holds main/step-000000010, but no committed checkpoint"):
            find_checkpoint(path)


def test_checkpoints_of_an_older_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds step-000000010, as an older format of checkpoints did"):
        find_checkpoint(tmp_path)


def test_a_torn_resume_is_refused_although_there_are_checkpoints(run: Path) -> None:
    (run / "checkpoints" / "RESUME").write_bytes(b'{"branch')
    with pytest.raises(CheckpointError, match=r"checkpoints/RESUME: not JSON"):
        find_checkpoint(run)
    assert find_checkpoint(run / "checkpoints" / "main").name == "step-000000030"
