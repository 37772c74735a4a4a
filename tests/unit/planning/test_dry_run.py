"""The 175B job on 12,288 ranks, laid out in one process: groups, stages and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.model_size import parameters_by_part
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.memory import estimate_memory
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run
from tests.helpers.forked_program import run_forked
from tests.helpers.source_tree import ROOT

CONFIG = ROOT / "configs" / "megascale_175b.toml"
STANDING = ["parameters", "gradients", "optimizer", "inputs"]
PASSING = ["activations", "working", "messages", "traveling"]
# In a separate process: a process has one world group at a time, and this one has 12,288 ranks.
SCRIPT = """
import json, sys
from pathlib import Path
from megatrain.config.load import load_config
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run

plan = plan_run(load_config(Path(sys.argv[1])).config)
zero_2 = plan_run(load_config(Path(sys.argv[1]), ["--parallel.zero_stage=2"]).config)
print(json.dumps({"plan": plan.to_dict(), "text": render(plan), "zero_2": zero_2.to_dict()}))
"""


@pytest.fixture(scope="module")
def output() -> dict[str, Any]:
    done = run_forked(["-c", SCRIPT, str(CONFIG)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_plan_has_layout_and_groups_of_175b(output: dict[str, Any]) -> None:
    plan = output["plan"]

    assert plan["layout"] == {"tp_size": 8, "pp_size": 8, "dp_size": 192}
    assert plan["world_size"] == 12288
    groups = {group["name"]: group for group in plan["groups"]}
    pipeline = list(range(0, 12288, 8 * 192))
    expected = {
        "tp": list(range(8)),
        "dp": list(range(0, 8 * 192, 8)),
        "pp": pipeline,
        "embedding": [pipeline[0], pipeline[-1]],
        "pp-forward": pipeline,
        "pp-backward": pipeline,
    }
    expected |= {f"host-{axis}": expected[axis] for axis in ("tp", "dp", "pp")}
    assert {name: group["example_ranks"] for name, group in groups.items()} == expected
    assert {name: group["size"] for name, group in groups.items()} == {name: len(r) for name, r in expected.items()}
    assert {name: group["num_groups"] for name, group in groups.items()} == {
        name: 12288 // len(ranks) if name != "embedding" else 8 * 192 for name, ranks in expected.items()
    }


@pytest.mark.slow
def test_plan_has_stages_and_parameters_of_175b(output: dict[str, Any]) -> None:
    plan, size = output["plan"], parameters_by_part(load_config(CONFIG).config.model)
    stages = {stage["name"]: stage for stage in plan["stages"]}

    assert [stage["stages"] for stage in plan["stages"]] == [[0], [1, 2, 3, 4, 5, 6], [7]]
    assert [stage["rank"] for stage in plan["stages"]] == [0, 1536, 10752]
    assert stages["head"]["layers"][0] == [14, 15]
    assert stages["head"]["layers"][-1] == [94, 95]
    assert plan["num_parameters"] == size.total
    # 12 blocks a rank: the matrices are divided by 8; norm and output biases (4 vectors of hidden_size) are not
    vectors = 4 * 12288
    blocks = 12 * ((size.block - vectors) // 8 + vectors)
    assert stages["middle"]["num_parameters"] == blocks
    assert stages["embedding"]["num_parameters"] == blocks + size.embedding // 8 + size.position
    assert stages["head"]["num_parameters"] == blocks + size.embedding // 8 + size.final_norm


@pytest.mark.slow
def test_plan_has_the_step_of_175b(output: dict[str, Any]) -> None:
    plan = output["plan"]

    assert (plan["schedule"], plan["num_chunks"], plan["num_microbatches"]) == ("interleaved", 6, 32)
    assert plan["bubble_fraction"] == pytest.approx(7 / (6 * 32))
    assert plan["num_tokens_per_step"] == 6144 * 2048
    assert plan["flops_per_step"] == pytest.approx(plan["flops_per_token"] * 6144 * 2048)


@pytest.mark.slow
def test_plan_has_the_memory_of_a_rank(output: dict[str, Any]) -> None:
    for stage in output["plan"]["stages"]:
        memory = stage["memory"]
        kinds = [memory[kind] for kind in STANDING + PASSING]
        padding = 4 * 6 * 192 * 128  # at most this many elements, in the buckets of 6 chunks
        assert 0 <= memory["parameters"] // 2 - stage["num_parameters"] <= padding
        assert memory["gradients"] == memory["parameters"] * 2  # fp32
        assert memory["optimizer"] == 3 * memory["gradients"] // 192  # sharded by ZeRO-1
        assert memory["total"] == sum(kinds)
        assert min(kinds[:-1]) > 0


@pytest.mark.slow
def test_zero_2_sends_gradients_once_a_micro_batch(output: dict[str, Any]) -> None:
    """A reduce-scatter of n ranks sends (n - 1) / n of the sum; ZeRO-2 does one for each of 32 micro-batches."""
    # 12 blocks a stage, 12 hidden_size^2 weights each besides biases and norms, divided by 8; sums in fp32 over 192
    # ranks
    formula = 12 * 12 * 12288**2 // 8 * 4 * 191 // 192
    sent = {}
    for name in ("plan", "zero_2"):
        (middle,) = (stage for stage in output[name]["stages"] if stage["name"] == "middle")
        sent[name] = {(one["group"], one["what"]): one["num_bytes"] for one in middle["traffic"]}
    of_step, of_micro_batches = (sent[name].pop(("dp", "gradients")) for name in ("plan", "zero_2"))

    assert of_micro_batches == 32 * of_step
    assert of_step == pytest.approx(formula, rel=1e-3)
    assert sent["plan"] == sent["zero_2"], "all else is sent as with ZeRO-1"
    rounded = [float(f"{num_bytes / 1e9:.2g}") for num_bytes in (of_micro_batches, of_step)]
    stated = f"send {rounded[0]:g} GB", f"sends {rounded[1]:g} GB"
    for path in (CONFIG, ROOT / "docs/guides/planning.md"):
        text = " ".join(path.read_text().replace("#", " ").split())
        assert all(figure in text for figure in stated), (path, stated)


@pytest.mark.slow
def test_plan_text_has_all_parts(output: dict[str, Any]) -> None:
    text = output["text"]

    for part in (
        "pp_size=8 dp_size=192 tp_size=8: 12,288 ranks",
        "interleaved, 6 chunks a stage, 32 micro-batches of 1 a pipeline, bubble 3.6%",
        "12,582,912 tokens",
        "174,770,774,016 parameters",
        "0, 8, 16, ..., 1528",
        "2,842,097,664",
        "Memory of one rank in GiB",
        "an upper bound: gradients in exchanges count",
    ):
        assert part in text
    assert all(line == line.rstrip() and len(line) <= 160 for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "fullest"), [("zero_bubble", 2), ("1f1b", 1)])
def test_plan_shows_the_fullest_middle_stage(schedule: str, fullest: int) -> None:
    """Recomputed blocks keep less than they defer: with zero_bubble the last of these stages has most."""
    changes = {"parallel.pp_size": 4, "parallel.recompute": "full", "parallel.schedule": schedule}
    config = Config.from_dict(with_changes(changes))
    layout = config.layout(None)
    with planned_mesh(config, layout, 1) as mesh:
        chunks = plan_stage(config, mesh)
    totals = {stage: estimate_memory(config, layout, stage, chunks) for stage in (1, 2)}

    assert max(totals, key=lambda stage: totals[stage].total) == fullest
    assert plan_run(config).stages[1].memory == totals[fullest]


def test_holders_of_a_key_value_head_have_their_group_planned() -> None:
    """A rank's parameters are its rows of the product: half of its head's queries, the head's key and value."""
    changes = {"parallel.tp_size": 4, "parallel.dp_size": 2, "model.num_heads": 4, "model.has_bias": False}
    one_each, shared = (
        plan_run(Config.from_dict(with_changes({**changes, "model.num_kv_heads": heads}))) for heads in (4, 2)
    )
    model = Config.from_dict(with_changes(changes)).model
    head = model.resolved_head_dim * model.hidden_size

    assert [(group.name, group.size, group.num_groups) for group in shared.groups if group not in one_each.groups] == [
        ("tp-in-2", 2, 4)
    ]
    # The whole model is smaller by two heads of keys and two of values per layer, but a rank has one of each as before.
    assert one_each.num_parameters - shared.num_parameters == 4 * head * model.num_layers
    assert one_each.stages[0].num_parameters == shared.stages[0].num_parameters
    assert one_each.stages[0].memory == shared.stages[0].memory


def test_step_has_the_flops_of_all_its_tokens() -> None:
    config = Config.from_dict(with_changes({"batch.global_batch_size": 8}))
    plan = plan_run(config)
    tokens = 8 * config.model.seq_len
    assert plan.num_tokens_per_step == tokens
    assert plan.to_dict()["flops_per_step"] == pytest.approx(tokens * plan.flops_per_token)


BY_CHUNK: dict[str, tuple[dict[str, Any], str]] = {
    "buckets of a layer": ({"parallel.bucket_size": 1024}, ""),
    "default, few replicas": ({}, ""),
    "default, many replicas": (
        {"parallel.dp_size": 64, "batch.global_batch_size": 128},
        "one bucket holds a whole chunk; parallel.bucket_size=",
    ),
    "no overlap": ({"parallel.overlap": False}, "parallel.overlap=false"),
    "aligned": ({"parallel.has_aligned_reductions": True}, "parallel.has_aligned_reductions=true"),
    "graphs": ({"kernels.cuda_graphs": True, "runtime.device": "cuda"}, "kernels.cuda_graphs=true"),
    "graphs on a CPU": ({"kernels.cuda_graphs": True, "runtime.device": "cpu"}, ""),
}


@pytest.mark.parametrize("case", BY_CHUNK)
def test_plan_states_why_buckets_are_exchanged_together(case: str) -> None:
    changes, expected = BY_CHUNK[case]
    found = plan_run(Config.from_dict(with_changes(changes))).by_chunk
    assert found.startswith(expected) if expected else found == ""


def test_unequal_replicas_are_planned_as_the_fullest_one() -> None:
    """8 micro-batches on 3 replicas take as long, and as much memory and traffic, as 9."""
    uneven, even = (
        plan_run(Config.from_dict(with_changes({"batch.global_batch_size": size, "parallel.dp_size": 3})))
        for size in (16, 18)
    )
    assert (uneven.num_microbatches, uneven.stages) == (even.num_microbatches, even.stages)
    assert (even.idle_share, "idle" in render(even)) == (0.0, False)
    assert uneven.to_dict()["idle_share"] == pytest.approx(1 / 9)
    assert "\n  idle      11.1% of the slots are idle: 8 micro-batches for 3 replicas, 2 to 3 each\n" in render(uneven)


def test_each_stage_of_the_data_is_planned_with_its_batch() -> None:
    stages = {
        "data_stage.after_tokens": 5000,
        "data_stage.global_batch_size": 24,
        "data_stage-2.after_tokens": 20_000,
        "data_stage-2.global_batch_size": 8,
    }
    sizes = {"parallel.dp_size": 3, "parallel.pp_size": 2}
    plan = plan_run(Config.from_dict(with_changes({"batch.global_batch_size": 8, **sizes, **stages})))
    alone = {
        size: plan_run(Config.from_dict(with_changes({"batch.global_batch_size": size, **sizes}))) for size in (8, 24)
    }
    assert replace(plan, later=()) == alone[8]
    assert [(one.after_tokens, one.plan) for one in plan.later] == [(5000, alone[24]), (20_000, alone[8])]
    assert alone[24].largest_stage.memory.total > alone[8].largest_stage.memory.total
    rows = render(plan).partition("Batch by stage of the data")[2].splitlines()[2:5]
    # Samples have 256 tokens: the steps at samples 0, 8 and 16 come before sample 20, those at 24, 48 and 72 before 79.
    assert [row.split()[:5] for row in rows] == [
        ["0", "1", "8", "256", "2,048"],
        ["5,000", "4", "24", "256", "6,144"],
        ["20,000", "7", "8", "256", "2,048"],
    ]
    assert [one["plan"]["num_microbatches"] for one in plan.to_dict()["later"]] == [4, 2]


def test_each_length_of_the_data_is_planned() -> None:
    changes = {"batch.global_batch_size": 8, "parallel.dp_size": 2}
    stages = {"data.seq_len": 64, "data_stage.after_tokens": 5000, "data_stage.seq_len": 256}
    plan = plan_run(Config.from_dict(with_changes({**changes, **stages})))
    (later,) = plan.later
    # Samples have at most 256 tokens, so without stages all have the same number.
    assert later.plan == plan_run(Config.from_dict(with_changes(changes)))
    assert (plan.seq_len, plan.num_tokens_per_step, later.first_step) == (64, 512, 10)
    assert plan.flops_per_token < later.plan.flops_per_token
    assert plan.largest_stage.memory.total < later.plan.largest_stage.memory.total
    assert "\n  most memory: from token 5,000 on, " in render(plan)


def test_mixture_of_pictures_and_text_is_planned() -> None:
    """Its FLOPs are those of the mean sample of each stage, its memory that of a micro-batch with pictures only."""
    pictures = {"model.picture_size": 64, "model.patch_size": 16, "batch.global_batch_size": 8}
    later = {"data_stage.after_tokens": 5000, "data_stage.global_batch_size": 16, "data_stage.weights": "web=1"}
    mixture = {"data_source.pictures": "drawn", "data_source-2.path": "web", "data_source-2.weight": 3.0}
    plan = plan_run(Config.from_dict(with_changes({**pictures, **mixture, **later})))
    whole, text = (
        plan_run(Config.from_dict(with_changes(one))) for one in (pictures, {**pictures, "data_source.path": "web"})
    )

    assert plan.flops_per_token == pytest.approx((whole.flops_per_token + 3 * text.flops_per_token) / 4)
    assert plan.later[0].plan.flops_per_token == text.flops_per_token < whole.flops_per_token
    assert plan.largest_stage.memory == whole.largest_stage.memory


def test_middle_stages_of_other_layers_are_distinguished() -> None:
    """An end stage that is a separate chunk, and middle stages of two kinds: the fullest stage is one of them."""
    changes = {"parallel.pp_size": 5, "model.num_layers": 7, "parallel.layers_per_chunk": [2, 2, 1, 2, 0]}
    config = Config.from_dict(with_changes(changes))
    plan = plan_run(config)
    text = render(plan)

    assert [(one.name, one.stages, one.layers) for one in plan.stages] == [
        ("embedding", (0,), ((0, 1),)),
        ("middle, layers 2", (1, 3), ((2, 3),)),
        ("middle, layers 1", (2,), ((4,),)),
        ("head", (4,), ((),)),
    ]
    layout = config.layout(None)
    for one in plan.stages:
        for stage in one.stages:
            with planned_mesh(config, layout, stage) as mesh:
                assert one.memory.total >= estimate_memory(config, layout, stage, plan_stage(config, mesh)).total
    assert any(line.split()[:6] == ["middle,", "layers", "2", "1,", "3", "1"] for line in text.splitlines())
