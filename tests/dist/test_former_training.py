"""Training goes on from a checkpoint that was written before rounds claimed, with the numbers of the former program.

That program wrote tests/golden/former-training: TINY with the tables of MODEL, two steps at tp2 dp2, a save, and three
more steps at pp2. run.json has what it reported.
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
TOLD: dict[str, list[float]] = json.loads((FORMER / "run.json").read_text())
MODEL: Tables = {
    "model": {
        "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 24, "norm": "rmsnorm",
        "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    },
    "parallel": {"bucket_size": 1000},
}  # fmt: skip
SAVED = 2


@pytest.fixture
def former(tmp_path: Path) -> Path:
    shutil.copytree(FORMER, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 2)])
def test_training_goes_on_with_the_same_numbers(
    jobs: TrainingJobs, train_data: Tables, former: Path, sizes: tuple[int, int, int]
) -> None:
    place: Tables = {"job": {"run_directory": str(former)}}
    run = jobs.run(make_config(MODEL, train_data, place, on_layout(*sizes)))
    assert [report.step for report in run.steps] == [3, 4, 5]
    assert_close(run.losses, TOLD["losses"][SAVED:], 1e-10, "loss")
    assert_close(run.grad_norms, TOLD["grad_norms_after"], 1e-10, "gradient norm")


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
    assert loss.item() == pytest.approx(TOLD["losses"][SAVED], rel=1e-6)
