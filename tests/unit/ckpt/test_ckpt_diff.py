"""`megatrain ckpt diff`: fields, tensors, and values, for any layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from tests.helpers.saved_checkpoint import Ckpt, put_whole, whole_state, with_layout, write_as_job
from tests.helpers.training_case import make_config


@pytest.fixture
def config() -> Config:
    return make_config()


def test_same_state_in_another_layout_differs_in_the_mesh_only(ckpt: Ckpt, config: Config, tmp_path: Path) -> None:
    state = whole_state(config)
    write_as_job(tmp_path / "a", with_layout(config, tp=2, dp=2), state)
    write_as_job(tmp_path / "b", with_layout(config, pp=2), state)

    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "--json")

    assert {one["name"] for one in found["fields"]} == {
        "mesh.tp_size", "mesh.pp_size", "mesh.dp_size", "config_hash", "config.parallel.tp_size",
        "config.parallel.pp_size", "config.parallel.dp_size",
    }  # fmt: skip
    assert found["tensors"] == []
    assert (found["num_compared"], found["values"]) == (len(state), [])


@pytest.mark.slow(kept=["layout0"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_values_that_differ_are_measured(ckpt: Ckpt, config: Config, tmp_path: Path, layout: dict[str, int]) -> None:
    state = whole_state(config)
    write_as_job(tmp_path / "a", config, state, max_item_bytes=2048)  # several items per tensor
    keys = [key for key in state if key.endswith("qkv.weight") and key.startswith("model.")][:2]
    state[keys[0]].view(-1)[5] += 0.5
    state[keys[0]].view(-1)[700] -= 0.25
    state[keys[1]].view(-1)[-1] = float("nan")
    write_as_job(tmp_path / "b", with_layout(config, **layout), state, step=9, max_item_bytes=2048)

    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "--json")
    text = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors")

    assert {"name": "step", "before": 7, "after": 9} in found["fields"]
    values = {one["key"]: one for one in found["values"]}
    assert set(values) == set(keys)
    assert values[keys[0]]["num_elements"] == 2
    assert values[keys[0]]["max_abs_difference"] == pytest.approx(0.5, abs=1e-6)
    assert values[keys[1]] == {"key": keys[1], "num_elements": 1, "max_abs_difference": None}
    assert "step: 7 -> 9" in text
    assert f"the values of 2 of {len(state)} tensors differ" in text
    assert f"{keys[0]}: 2 of" in text


def test_tensors_of_one_alone_and_of_other_shapes(ckpt: Ckpt, tmp_path: Path) -> None:
    branch = LocalLocation(tmp_path / "x")
    one, other = put_whole(branch, 1, torch.zeros(4, 2)), put_whole(branch, 2, torch.zeros(2, 4))
    (found,) = ckpt("diff", one, other, "--tensors", "--json")["tensors"]
    assert found == {"key": "model.word", "before": "float32 [4, 2]", "after": "float32 [2, 4]"}

    write_as_job(tmp_path / "job", make_config(), whole_state(make_config()))
    assert "model.word: only in A" in ckpt("diff", one, tmp_path / "job")


def test_moments_are_readable(ckpt: Ckpt, run: Path) -> None:
    later = put_whole(LocalLocation(run / "checkpoints/main"), 50, written_unix_s=1_790_000_060.5)
    text = ckpt("diff", run / "checkpoints/main/step-000000010", later)
    assert "written_unix_s: 2026-09-21 14:13:20 UTC -> 2026-09-21 14:14:20 UTC" in text
