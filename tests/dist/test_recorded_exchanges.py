"""The exchanges of a whole job in its black boxes: their number, size, ranks, and that each one ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBox
from megatrain.planning.run_plan import plan_run
from megatrain.schedule import ActionKind, build_schedule
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans
from tests.helpers.training_case import make_config, on_layout

STEPS = 2
MESSAGES = {
    ActionKind.SEND_FORWARD: Operation.FORWARD_SEND,
    ActionKind.RECV_FORWARD: Operation.FORWARD_RECV,
    ActionKind.SEND_BACKWARD: Operation.BACKWARD_SEND,
    ActionKind.RECV_BACKWARD: Operation.BACKWARD_RECV,
}
COMPUTES = {ActionKind.FORWARD: Operation.FORWARD_COMPUTE, ActionKind.BACKWARD: Operation.BACKWARD_COMPUTE}
TRAFFIC = (
    Operation.TP_ALL_GATHER,
    Operation.TP_REDUCE_SCATTER,
    Operation.PARAMS_ALL_GATHER,
    Operation.GRADS_REDUCE_SCATTER,
    Operation.EMBEDDING_ALL_REDUCE,
    Operation.TP_ALL_REDUCE,
)
FP64_BYTES = 8


@pytest.fixture(scope="module")
def config(train_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Config:
    boxes = tmp_path_factory.mktemp("boxes")
    short: Tables = {"train": {"steps": STEPS}, "optimizer": {"lr_warmup_steps": 1}}
    return make_config(train_data, short, on_layout(2, 2, 2, 2), recording_in(boxes))


@pytest.fixture(scope="module")
def boxes(config: Config, jobs: TrainingJobs) -> dict[int, BlackBox]:
    jobs.run(config)
    return boxes_by_rank(Path(config.telemetry.black_box_directory))


@pytest.mark.slow
def test_every_exchange_has_ended_on_both_sides(boxes: dict[int, BlackBox]) -> None:
    for rank, box in boxes.items():
        assert not [span for span in box.in_flight if span.group], rank
        for group in box.groups.values():
            assert group.entered == group.left, (rank, group)
        spoken = {group.name: group for group in box.groups.values() if group.entered}
        assert {"tp", "dp", "pp", "embedding", "pp-forward", "pp-backward"} <= spoken.keys()
    # The members of a group have recorded the same exchanges, and the ends of a link the same messages.
    entered: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for box in boxes.values():
        for group in box.groups.values():
            entered.setdefault((group.name, tuple(group.ranks)), set()).add(group.entered)
    assert all(len(counts) == 1 for counts in entered.values()), entered


def test_messages_and_computes_are_those_of_the_schedule(config: Config, boxes: dict[int, BlackBox]) -> None:
    parallel, model = config.parallel, config.model
    num_microbatches = config.batch.global_batch_size // (config.batch.micro_batch_size * parallel.dp_size)
    schedule = build_schedule(parallel.schedule, parallel.pp_size, parallel.num_chunks, num_microbatches)
    hidden_bytes = model.seq_len // parallel.tp_size * config.batch.micro_batch_size * model.hidden_size * FP64_BYTES
    for rank, box in boxes.items():
        actions = schedule.stages[box.identity.coordinate["pp"]]
        for kind, operation in (MESSAGES | COMPUTES).items():
            found = Counter((span.step, span.chunk, span.microbatch) for span in spans(box, operation))
            expected = Counter(
                (step, action.chunk, action.microbatch)
                for step in range(STEPS)
                for action in actions
                if action.kind is kind
            )
            assert found == expected, (rank, operation)
        for operation in MESSAGES.values():
            assert {span.num_bytes for span in spans(box, operation)} == {hidden_bytes}


def test_messages_go_over_links_of_two_ranks_sender_first(config: Config, boxes: dict[int, BlackBox]) -> None:
    for rank, box in boxes.items():
        is_last = box.identity.coordinate["pp"] == 1
        next_or_first = box.identity.layout.ranks_along(rank, "pp")[0 if is_last else 1]
        links = {
            operation: {
                (box.groups[span.group].name, tuple(box.groups[span.group].ranks)) for span in spans(box, operation)
            }
            for operation in MESSAGES.values()
        }
        ahead, back = (rank, next_or_first), (next_or_first, rank)
        assert links == {
            Operation.FORWARD_SEND: {("pp-forward-wrap" if is_last else "pp-forward", ahead)},
            Operation.FORWARD_RECV: {("pp-forward" if is_last else "pp-forward-wrap", back)},
            Operation.BACKWARD_SEND: {("pp-backward" if is_last else "pp-backward-wrap", ahead)},
            Operation.BACKWARD_RECV: {("pp-backward-wrap" if is_last else "pp-backward", back)},
        }


def test_collectives_are_of_their_axis_and_size(config: Config, boxes: dict[int, BlackBox]) -> None:
    for box in boxes.values():
        names = {
            operation: {box.groups[span.group].name for span in spans(box, operation)}
            for operation in Operation
            if operation.is_collective
        }
        assert names[Operation.TP_ALL_GATHER] == names[Operation.TP_REDUCE_SCATTER] == {"tp"}
        assert names[Operation.PARAMS_ALL_GATHER] == names[Operation.GRADS_REDUCE_SCATTER] == {"dp"}
        assert names[Operation.PP_ALL_REDUCE] == {"pp"}
        assert names[Operation.EMBEDDING_ALL_REDUCE] == {"embedding"}
        # A rank passes whole gradients to a reduction, and its shard of the parameters to a gather.
        reduced = [span.num_bytes for span in spans(box, Operation.GRADS_REDUCE_SCATTER) if span.step == 0]
        gathered = [span.num_bytes for span in spans(box, Operation.PARAMS_ALL_GATHER) if span.step == 1]
        assert sorted(reduced) == sorted(config.parallel.dp_size * num_bytes for num_bytes in gathered)
        assert len(set(reduced)) > 1


def test_parameters_are_on_their_way_before_the_next_data(boxes: dict[int, BlackBox]) -> None:
    for rank, box in boxes.items():
        (updated,) = [span for span in spans(box, Operation.OPTIMIZER) if span.step == 0]
        (waited,) = [span for span in spans(box, Operation.DATA_WAIT) if span.step == 1]
        assert updated.duration_ns is not None
        gathers = [
            span
            for span in spans(box, Operation.PARAMS_ALL_GATHER)
            if updated.start_ns + updated.duration_ns <= span.launch_ns < waited.start_ns
        ]
        # every bucket of this rank
        num_buckets = len([span for span in spans(box, Operation.GRADS_REDUCE_SCATTER) if span.step == 0])
        assert len(gathers) == num_buckets, rank


def test_a_plan_names_the_bytes_that_ranks_send(config: Config, boxes: dict[int, BlackBox]) -> None:
    planned = {
        stage: {(one.group, one.what): one.num_bytes for one in plan.traffic}
        for plan in plan_run(config).stages
        for stage in plan.stages
    }
    tp_size, dp_size = config.parallel.tp_size, config.parallel.dp_size
    for rank, box in boxes.items():
        # A record has the bytes of this rank's input: its shard for a gather, everything for a scatter.
        recorded = {
            operation: sum(span.num_bytes for span in spans(box, operation) if span.step == STEPS - 1)
            for operation in (*TRAFFIC, Operation.FORWARD_SEND, Operation.BACKWARD_SEND)
        }
        gathered, scattered = recorded[Operation.TP_ALL_GATHER], recorded[Operation.TP_REDUCE_SCATTER]
        sent = {
            ("tp", "tokens"): (tp_size - 1) * (gathered + scattered // tp_size),
            ("dp", "parameters"): (dp_size - 1) * recorded[Operation.PARAMS_ALL_GATHER],
            ("dp", "gradients"): (dp_size - 1) * recorded[Operation.GRADS_REDUCE_SCATTER] // dp_size,
            ("pp", "messages"): recorded[Operation.FORWARD_SEND] + recorded[Operation.BACKWARD_SEND],
            # An all-reduce of two ranks: each sends half of its sums, and half of the total.
            ("embedding", "gradients"): recorded[Operation.EMBEDDING_ALL_REDUCE],
        }
        found = dict(planned[box.identity.coordinate["pp"]])
        of_norms = found.pop(("tp", "gradients"))
        assert sent == found, rank
        # The norm of the gradients and the statistics of the loss are recorded too.
        assert 0 < of_norms < recorded[Operation.TP_ALL_REDUCE], rank
