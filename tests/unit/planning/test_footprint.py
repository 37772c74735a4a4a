"""The memory of a rank by parts, also along more axes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.memory import LLAMA, with_changes
from megatrain.checkpoint.peers import choose_keepers
from megatrain.checkpoint_format.manifest import CheckpointMesh, Manifest
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.layout import Layout, axis_named
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run
from tests.helpers.checkpoint_tree import make_manifest

S, B, H, N = 64, 2, 64, 4
TOKENS = S * B
WIDE_LLAMA = LLAMA | {"model.ffn_size": 3 * H}
BF16 = {"train.precision": "bf16"}
FP8 = {**WIDE_LLAMA, **BF16, "model.num_kv_heads": N, "fp8.recipe": "tensorwise"}
# norm's input and output, twice; queries, keys, values; attention's output; both sides of the activation function
GPT_WIDTH = 2 * 2 * H + 3 * H + H + 2 * 4 * H
GPT_NUMBERS = 4 + N
"""Mean and deviation of two norms, and a sum per head: in the type of sums."""
LLAMA_WIDTH = 2 * 2 * H + 2 * H + H + 3 * 3 * H
LLAMA_NUMBERS = 2 + N
CASES: dict[str, tuple[dict[str, Any], float]] = {
    # changes, bytes per token
    "GPT": ({}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, bf16": (BF16, 2 * GPT_WIDTH + 4 * GPT_NUMBERS),
    "GPT, fp64": ({"train.precision": "fp64"}, 8 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, no bias": ({"model.has_bias": False}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "GPT, dropout": ({"model.dropout": 0.1}, 4 * (GPT_WIDTH + GPT_NUMBERS) + 2 * 8),
    "GPT, selective": ({"parallel.recompute": "selective"}, 4 * (GPT_WIDTH - 2 * H - 4 * H + GPT_NUMBERS)),
    "GPT, full": ({"parallel.recompute": "full"}, 4 * H),
    "parallel block": ({"model.block": "parallel"}, 4 * (GPT_WIDTH - 2 * H + GPT_NUMBERS - 2)),
    "Llama": (WIDE_LLAMA, 4 * (LLAMA_WIDTH + LLAMA_NUMBERS)),
    "Llama on a GPU": ({**WIDE_LLAMA, **BF16, "runtime.device": "cuda"}, 2 * LLAMA_WIDTH + 4 * LLAMA_NUMBERS),
    "window on a GPU": ({**BF16, "model.window_size": 16, "runtime.device": "cuda"}, 2 * GPT_WIDTH + 4 * GPT_NUMBERS),
    "fp32 on a GPU": ({"runtime.device": "cuda"}, 4 * (GPT_WIDTH + GPT_NUMBERS)),
    "fp32 and a window on a GPU, whose mask all layers share": (
        {"model.window_size": 16, "runtime.device": "cuda"},
        4 * (GPT_WIDTH + GPT_NUMBERS),
    ),
    "documents on a GPU": (
        {**WIDE_LLAMA, **BF16, "data.has_document_mask": True, "runtime.device": "cuda"},
        # Samples are separate calls, and their outputs are concatenated.
        2 * (LLAMA_WIDTH + H) + 4 * LLAMA_NUMBERS,
    ),
    "apex norms": (
        {**WIDE_LLAMA, **BF16, "kernels.norm": "apex", "runtime.device": "cuda"},
        2 * LLAMA_WIDTH + 4 * LLAMA_NUMBERS,
    ),
    "two tensor ranks": ({"parallel.tp_size": 2}, 4 * (GPT_WIDTH + GPT_NUMBERS) / 2),
    "two tensor ranks, 4 sequence chunks": (
        {"parallel.tp_size": 2, "parallel.num_sequence_chunks": 4},
        4 * (GPT_WIDTH + GPT_NUMBERS) / 2,
    ),
    "two tensor ranks, selective": (
        {"parallel.tp_size": 2, "parallel.recompute": "selective"},
        4 * (GPT_WIDTH - 2 * H - 4 * H + GPT_NUMBERS) / 2,
    ),
    # in 8 bits: the inputs of four products
    "FP8": (FP8, 2 * (2 * H + 3 * H + H + 2 * 3 * H) + 4 * LLAMA_NUMBERS + 2 * H + H + 3 * H),
    "FP8 by Transformer Engine": (
        {**FP8, "fp8.backend": "transformer_engine", "runtime.device": "cuda"},
        # and weights, each in two forms
        2 * (2 * H + 3 * H + H + 2 * 3 * H) + 4 * LLAMA_NUMBERS + 6 * H + 2 * (4 * H * H + 9 * H * H) / TOKENS,
    ),
}  # fmt: skip


@pytest.mark.slow(kept=["GPT, bf16", "Llama"])
@pytest.mark.parametrize(("changes", "bytes_a_token"), CASES.values(), ids=CASES)
def test_a_layer_keeps_what_its_backward_needs(changes: dict[str, Any], bytes_a_token: float) -> None:
    kept = []
    for num_layers in (2, 3):
        tables = with_changes(
            {
                "model.seq_len": S,
                "model.hidden_size": H,
                "model.num_heads": N,
                "batch.micro_batch_size": B,
                "model.num_layers": num_layers,
                **changes,
            }
        )
        config = Config.from_dict(tables)
        with planned_mesh(config, config.layout(None), 0) as mesh:
            (chunk,) = plan_stage(config, mesh)
        kept.append(chunk.measured.footprint.kept)
        assert chunk.measured.footprint.kept_of_newest == 0, "without offloading, all micro-batches keep the same"

    # scales of FP8, states of random numbers
    assert 0 <= kept[1] - kept[0] - bytes_a_token * TOKENS < 256


SMALL = {"model.vocab_size": 64, "model.seq_len": 32, "model.hidden_size": 32}
LAYOUT = Layout(pp_size=2, cp_size=2, tp_size=2, ep_size=4)


def test_a_rank_of_a_dry_run_has_a_group_along_every_axis() -> None:
    with dry_mesh(LAYOUT, 5) as mesh:
        assert {axis: group.ranks for axis, group in mesh.along.items()} == {
            axis: LAYOUT.ranks_along(5, axis) for axis in LAYOUT.axes
        }
        assert {axis: group.ranks for axis, group in mesh.cpu_groups.along.items()} == {
            axis: LAYOUT.ranks_along(5, axis) for axis in LAYOUT.axes
        }
        assert [group.name for group in mesh.cpu_groups.groups] == ["host-tp", "host-pp", "host-cp", "host-dp"]
        assert (mesh.stage, mesh.coordinate) == (1, {"pp": 1, "dp": 0, "cp": 0, "tp": 1, "edp": 0, "ep": 1})
        names = [group.name for group in mesh.groups if group.size > 1]
    assert names == [
        *("pp", "cp", "tp", "ep", "embedding", "host-pp", "host-cp", "host-tp", "host-ep", "pp-forward", "pp-backward")
    ]


def test_a_dry_run_lists_every_axis_and_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # No option of [parallel] gives these sizes yet; the dry run supports them.
    monkeypatch.setattr(Config, "layout", lambda *_: LAYOUT)
    changes = {"parallel.pp_size": 2, "parallel.tp_size": 2}
    plan = plan_run(Config.from_dict(with_changes(SMALL | changes)))
    lines = [line.split() for line in render(plan).splitlines()]

    assert plan.to_dict()["layout"] == LAYOUT.sizes
    reported = {line[0]: line for line in lines if line and line[0] in LAYOUT.axes}
    assert list(reported) == list(LAYOUT.axes)
    for axis in LAYOUT.axes:
        assert [axis, axis_named(axis).title, f"{LAYOUT.size(axis)}", f"{LAYOUT.stride(axis)}"] in [
            line[:4] for line in lines
        ]
    groups = {group.name: group for group in plan.groups}
    assert groups.keys() >= {axis for axis in LAYOUT.axes if LAYOUT.size(axis) > 1}
    for name, group in groups.items():
        if name in LAYOUT.axes:
            assert (group.size, group.num_groups) == (LAYOUT.size(name), LAYOUT.world_size // LAYOUT.size(name))
        assert [name, f"{group.size}", f"{group.num_groups}"] in [line[:3] for line in lines]


def test_copies_lie_outside_of_the_groups_along_every_axis() -> None:
    layout = Layout(pp_size=2, cp_size=2, tp_size=2)
    host_of = [f"host-{rank // 2}" for rank in range(layout.world_size)]
    keepers = choose_keepers(layout, host_of)
    assert sorted(keepers) == list(range(8))
    for rank, keeper in enumerate(keepers):
        near = {host_of[member] for axis in layout.axes for member in layout.ranks_along(rank, axis)}
        assert host_of[keeper] not in near


def test_a_manifest_lists_the_axes_that_are_cut() -> None:
    manifest = make_manifest(mesh=CheckpointMesh(LAYOUT, num_chunks=1))
    raw = json.loads(manifest.to_json())
    assert raw["mesh"] == {"pp_size": 2, "dp_size": 1, "cp_size": 2, "tp_size": 2, "ep_size": 4, "num_chunks": 1}
    assert Manifest.from_json(json.dumps(raw), "m.json").mesh == manifest.mesh
    assert manifest.mesh.layout.sizes_text == "pp 2, dp 1, cp 2, tp 2, ep 4"
    with pytest.raises(CheckpointError, match=r"m\.json: mesh\.ep_size=3; ep_size = 3 must divide the 4 ranks"):
        Manifest.from_json(json.dumps({**raw, "mesh": {**raw["mesh"], "ep_size": 3}}), "m.json")
