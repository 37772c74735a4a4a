"""The update and the messages in a dry run: parameter groups, state, memory, and bytes by group."""

from __future__ import annotations

from typing import Any

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.config.model_size import block_weights, num_parameters
from megatrain.planning.parameter_groups import grouped_parameters
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import RunPlan, plan_run

SMALL = {"model.vocab_size": 64, "model.seq_len": 16, "model.hidden_size": 32, "model.num_layers": 2}
EMBEDDING = (128 + 16) * 32
"""Elements of the padded token embeddings and of the position embeddings."""
GROUPS = {"parameter_group.pattern": "embedding.*", "parameter_group.lr_scale": 0.5}


def config_with(**changes: Any) -> Config:
    return Config.from_dict(with_changes(SMALL | {key.replace("__", "."): change for key, change in changes.items()}))


def sent(plan: RunPlan) -> dict[str, int]:
    return {one.group: one.num_bytes for one in plan.stages[0].traffic if one.what == "updates"}


def test_groups_have_all_parameters_once() -> None:
    config = Config.from_dict(with_changes(SMALL | GROUPS | {"optimizer.name": "muon", "optimizer.ema_decay": 0.9}))
    embedding, *others = grouped_parameters(config)
    hidden = 2 * block_weights(config.model)

    assert (embedding.pattern, embedding.rule.lr_scale, embedding.num_parameters) == ("embedding.*", 0.5, EMBEDDING)
    assert [(other.pattern, other.rule.name) for other in others] == [("", "adamw"), ("", "muon")]
    assert [other.num_parameters for other in others] == [num_parameters(config.model) - hidden - EMBEDDING, hidden]
    assert [other.num_tensors for other in others] == [2 * 8 + 2, 2 * 4]
    assert [other.rule.state_kinds for other in others] == [("exp_avg", "exp_avg_sq", "ema"), ("exp_avg", "ema")]


def test_the_plan_lists_groups_and_what_muon_sends() -> None:
    layout = {"parallel__dp_size": 2, "parallel__tp_size": 2}
    plan = plan_run(config_with(**layout, optimizer__name="muon", parameter_group__pattern="embedding.*"))
    of_bf16 = plan_run(config_with(**layout, optimizer__name="muon", optimizer__muon_precision="bf16"))
    plain = plan_run(config_with(**layout))
    hidden = 2 * block_weights(config_with().model)

    assert plan.checkpoint_bytes == 4 * (3 * plan.num_parameters - hidden)
    assert plain.checkpoint_bytes == 4 * 3 * plan.num_parameters
    assert sent(plan) == {group: 2 * num_bytes for group, num_bytes in sent(of_bf16).items()}
    # A rank has a quarter of the weights, in fp32: it sends at most that, and the results of another quarter.
    assert all(0 < num_bytes <= 2 * hidden for num_bytes in sent(plan).values())
    assert sent(plan).keys() == {"dp", "tp"}
    assert not sent(plain)
    assert not sent(plan_run(config_with(optimizer__name="muon")))
    assert plan.stages[0].memory.optimizer < plain.stages[0].memory.optimizer
    lines = [line.split() for line in render(plan).splitlines()]
    assert ["embedding.*", "adamw", "2", f"{EMBEDDING:,}", "1", "0.1", "of", "matrices"] in lines
    assert "Parameter groups" not in render(plain)


def test_update_is_the_fullest_moment_with_few_activations() -> None:
    few = {"model__seq_len": 2, "model__vocab_size": 8, "model__hidden_size": 256, "batch__micro_batch_size": 1}
    plan = plan_run(config_with(**few, optimizer__name="muon"))
    memory = plan.stages[0].memory

    assert (memory.moment, memory.activations, memory.traveling) == ("update", 0, 0)
    # at least the momentum of all hidden weights, in fp32
    assert memory.working >= 4 * 2 * block_weights(config_with(**few).model)


MODEL = {"model.vocab_size": 1024, "model.hidden_size": 128, "model.num_layers": 3, "model.seq_len": 64}
EMBEDDING_BYTES = 1024 * 128 * 4


def sums_of(group: str, **changes: Any) -> list[list[int]]:
    """Return, for each kind of stage, how many bytes of gradients a rank sends over this group."""
    tables = with_changes(
        MODEL | {"parallel.pp_size": 3} | {key.replace("__", "."): one for key, one in changes.items()}
    )
    return [
        [one.num_bytes for one in stage.traffic if (one.group, one.what) == (group, "gradients")]
        for stage in plan_run(Config.from_dict(tables)).stages
    ]


def test_the_ends_of_a_pipeline_sum_a_tied_embedding() -> None:
    """Each of two ranks sends half of the gradient twice; with replicas and tp only its shard of it."""
    assert sums_of("embedding", model__has_tied_head=True) == [[EMBEDDING_BYTES], [], [EMBEDDING_BYTES]]
    shards = sums_of("embedding", model__has_tied_head=True, parallel__tp_size=2, parallel__dp_size=2)
    assert shards == [[EMBEDDING_BYTES // 4], [], [EMBEDDING_BYTES // 4]]
    assert sums_of("embedding", model__has_tied_head=False) == [[], [], []]


def test_tp_ranks_sum_the_gradients_of_norms() -> None:
    assert sums_of("tp") == [[], [], []]
    found = sums_of("tp", parallel__tp_size=2)
    assert all(0 < one < EMBEDDING_BYTES for (one,) in found)
