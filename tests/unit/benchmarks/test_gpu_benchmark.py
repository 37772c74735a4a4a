"""The GPU benchmark as far as it goes without a GPU: its cases run, its peer is the same model, its record survives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import Record, beside, markdown
from benchmarks.gpu_operator_cases import Case, Sizes, cases, products
from benchmarks.gpu_step import (
    PlainLlama,
    host_bound_config,
    idle_share,
    layers_that_fit,
    model_config,
    our_config,
    our_step,
    peer_step,
)
from megatrain.config import load_config
from megatrain.config.checks import check
from tests.helpers.source_tree import ROOT

CPU = torch.device("cpu")
SMALL = Sizes(tokens=32, hidden=64, ffn=96, heads=4, kv_heads=2, vocab_size=128, num_weights=64 * 64)
CASES = list(cases(SMALL, CPU))
TINY = {"hidden_size": 64, "ffn_size": 96, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_sides_of_a_case_run_again_and_again(case: Case) -> None:
    works = [case.ours()]
    if case.theirs is not None and "AdamW" not in case.name:  # capturable AdamW is for CUDA alone
        works.append(case.theirs(lambda operation: operation))
    for work in works:
        for _ in range(2):
            work()
    assert case.num_bytes > 0


def test_products_are_those_of_a_layer_and_every_way_runs() -> None:
    found = list(products(SMALL, CPU))
    for _, flops, ways in found:
        assert flops > 0
        for make in ways.values():
            work = make()
            work()
            work()

    # Llama 3 8B: 218,103,808 weights a layer and 525,336,576 of the head, each twice a token
    a_layer = sum(flops for name, flops, _ in products(Sizes(tokens=1), torch.device("meta")) if name != "head")
    assert a_layer == 2 * 218_103_808


def test_the_peer_is_the_same_model() -> None:
    model = model_config(2, seq_len=32, **TINY)
    step, trainer = our_step(our_config(model), CPU)
    ours = sum(one.numel() for chunk in trainer.replica.pipeline.chunks for one in chunk.module.parameters())
    trainer.close()
    del step

    assert ours == sum(one.numel() for one in PlainLlama(model).parameters())


def test_both_sides_train() -> None:
    model = model_config(1, seq_len=32, **TINY)
    tokens = torch.randint(0, 128, (33, 1), generator=torch.Generator().manual_seed(0))
    ours, trainer = our_step(our_config(model, optimizer={"lr": 1e-2}), CPU)
    for step in (ours, peer_step(model, CPU, is_compiled=False)):
        losses = [step(tokens) for _ in range(3)]
        assert losses[-1] < losses[0]
    trainer.close()


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_host_bound_model_trains_with_and_without_graphs(has_graphs: bool) -> None:
    base = load_config(ROOT / "configs" / "gpt_125m.toml", ["--model.seq_len=16", "--model.vocab_size=128"]).config
    small = base.to_dict()
    small["model"] |= {"hidden_size": 64, "num_layers": 1, "num_heads": 4}
    config = host_bound_config(type(base).from_dict(small), cuda_graphs=has_graphs)
    assert check(config, {}, world_size=1) == []
    assert (config.kernels.cuda_graphs, config.batch.micro_batch_size) == (has_graphs, 1)

    step, trainer = our_step(config, CPU)
    tokens = torch.randint(0, 128, (17, config.batch.global_batch_size), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.close()


def test_layers_that_fit_leave_room_for_activations() -> None:
    model = model_config(1)
    num_layers = layers_that_fit(150 << 30, model)
    a_layer, ends = 218_103_808, 2 * 128256 * 4096

    assert 0.65 < (num_layers * a_layer + ends) * 18 / (150 << 30) <= 0.72
    assert layers_that_fit(1 << 30, model) == 1


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([(0.0, 1.0), (1.0, 2.0)], 0.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], 0.0),
        ([(0.0, 1.0), (0.5, 1.0), (2.0, 2.5)], 0.4),
        ([], 0.0),
    ],
)
def test_idle_is_the_time_in_which_no_kernel_ran(spans: list[tuple[float, float]], idle: float) -> None:
    assert idle_share(spans) == pytest.approx(idle)


def test_every_stage_is_on_disk_when_it_is_done(tmp_path: Path) -> None:
    record = Record(tmp_path, "python3 -m benchmarks.gpu")
    record.add("Ceilings", {"copy, TB/s": 4.2}, 1.0)
    assert json.loads((tmp_path / "gpu.json").read_text())["stages"]["Ceilings"]["found"] == {"copy, TB/s": 4.2}
    record.add("Memory-bound operations", [{"operation": "rms_norm", "ours, us": 50.0}], 2.0)
    record.add("Whole steps", "not reached: the time was up", 0.0)

    page = (tmp_path / "gpu.md").read_text()
    assert page == markdown(record.document)
    assert "- copy, TB/s: 4.2" in page
    assert "| rms_norm |" in page
    assert "not reached: the time was up" in page


def test_sides_are_compared_with_one_of_them_and_a_side_that_broke_stays_in_the_table() -> None:
    rows = beside(
        [
            {"side": "a", "seconds": 2.0, "mfu": 0.5},
            {"side": "b", "seconds": 3.0, "mfu": 0.3},
            {"side": "c", "seconds": "out of memory"},
        ],
        "a",
    )

    assert [row["seconds / a"] for row in rows] == [1.0, 1.5, ""]
    assert [row["mfu"] for row in rows] == [0.5, 0.3, ""]


def test_offloaded_side_trains_as_the_other_does() -> None:
    model = model_config(3, seq_len=32, **TINY)
    tokens = torch.randint(0, 128, (33, 1), generator=torch.Generator().manual_seed(0))
    losses = []
    for num_offloaded in (0, 2):
        step, trainer = our_step(our_config(model, parallel={"offload_layers": num_offloaded}), CPU)
        losses.append([step(tokens) for _ in range(2)])
        trainer.close()

    assert losses[0] == losses[1]


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "benchmarks.gpu: torch sees no GPU on this machine\n"
