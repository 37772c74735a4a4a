"""Training goes on from checkpoints that former programs wrote, with the numbers of those programs.

The one from before rounds claimed wrote tests/golden/former-training: TINY with the tables of MODEL, two steps at
tp2 dp2, a save, and three more steps at pp2. The one from before placements (commit 68f2a0d) wrote each directory of
tests/golden/former-placements: TINY with the tables of LAMB and PLACED, stopped and saved after two steps, and beside
that five steps in one go. run.json has what each reported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.data.dataset import open_dataset
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from tests.dist.training_jobs import Tables, TrainingJobs, assert_close
from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config, on_layout

FORMER = ROOT / "tests" / "golden" / "former-training"
RECORDED: dict[str, list[float]] = json.loads((FORMER / "run.json").read_text())
MODEL: Tables = {
    "model": {
        "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 24, "norm": "rmsnorm",
        "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    },
    "parallel": {"bucket_size": 1000},
}  # fmt: skip
PLACEMENTS = ROOT / "tests" / "golden" / "former-placements"
LAMB: Tables = {"parallel": {"bucket_size": 250}, "optimizer": {"name": "lamb", "weight_decay": 0.1}}
SMALL: dict[str, Any] = {
    "hidden_size": 4, "num_layers": 2, "num_heads": 2, "ffn_size": 6, "vocab_multiple": 2, "block": "parallel",
    "norm": "rmsnorm", "positions": "rope", "has_bias": False,
}  # fmt: skip
PLACED: dict[str, dict[str, Any]] = {
    "tp2-dp2": SMALL | {"num_layers": 1, "positions": "learned"},
    "pp2-tied": SMALL,
}
"""The model of each layout: parameters whole on tp ranks, one of them decayed; a tied embedding on two stages."""
SAVED = 2


@pytest.fixture
def former(tmp_path: Path) -> Path:
    shutil.copytree(FORMER, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow(kept=["sizes0"])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 2)])
def test_training_goes_on_with_the_same_numbers(
    jobs: TrainingJobs, train_data: Tables, former: Path, sizes: tuple[int, int, int]
) -> None:
    place: Tables = {"job": {"run_directory": str(former)}}
    run = jobs.run(make_config(MODEL, train_data, place, on_layout(*sizes)))
    assert [report.step for report in run.steps] == [3, 4, 5]
    assert_close(run.losses, RECORDED["losses"][SAVED:], 1e-10, "loss")
    assert_close(run.grad_norms, RECORDED["grad_norms_after"], 1e-10, "gradient norm")


@pytest.mark.slow(kept=["tp2-dp2-sizes1"])
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("tp2-dp2", (2, 1, 2)), ("tp2-dp2", (1, 1, 1)), ("pp2-tied", (1, 2, 1)), ("pp2-tied", (2, 2, 2))],
)
def test_training_goes_on_from_before_placements(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path, layout: str, sizes: tuple[int, int, int]
) -> None:
    shutil.copytree(PLACEMENTS / layout, tmp_path / "run")
    told = json.loads((PLACEMENTS / layout / "run.json").read_text())
    place: Tables = {"job": {"run_directory": str(tmp_path / "run")}}
    run = jobs.run(make_config(LAMB, {"model": PLACED[layout]}, train_data, place, on_layout(*sizes)))
    assert [report.step for report in run.steps] == [3, 4, 5]
    assert_close(run.losses, told["losses"][SAVED:], 1e-10, "loss")
    assert_close(run.grad_norms, told["grad_norms"][SAVED:], 1e-10, "gradient norm")


def test_transformers_finds_the_loss_that_training_went_on_with(former: Path, train_data: Tables) -> None:
    transformers: Any = require_module("transformers")
    step = former / "checkpoints" / "main" / "step-000000002"
    assert main(["ckpt", "export-hf", str(step), "--output", str(former / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(former / "hf").eval()
    config = make_config(MODEL, train_data)
    dataset = open_dataset(Path(config.data.train), config.model.vocab_size)
    order = SampleOrder(dataset.num_tokens, config.model.seq_len, config.resolved_data_seed)
    size = config.batch.global_batch_size
    batch = BatchReader(dataset, order, False).read_step(SAVED * size, size, 0, 1, size)
    (micro,) = batch.microbatches
    with torch.no_grad():
        logits = theirs(micro.tokens_SB.T).logits
    labels = micro.labels_SB.T
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1)[:, : config.model.vocab_size].double(), labels.flatten()
    )
    assert loss.item() == pytest.approx(RECORDED["losses"][SAVED], rel=1e-6)
