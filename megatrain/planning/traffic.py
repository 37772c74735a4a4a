"""How many bytes a rank sends in a training step, by group: from the schedule, the buckets and the measured chunks.

A rank of a group of n sends (n - 1) / n of the whole tensor in an all-gather or a reduce-scatter, by any ring or direct
algorithm, and twice that in an all-reduce. Small sums (counts, norms, flags) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.contracts.layout import STAGES
from megatrain.ops.precision import DTYPES
from megatrain.parallel.bucket import Bucket
from megatrain.planning.chunks import PlannedChunk
from megatrain.planning.update import PlannedUpdate
from megatrain.schedule import Action, ActionKind

PARAMETERS, GRADIENTS, MESSAGES, TOKENS, UPDATES = "parameters", "gradients", "messages", "tokens", "updates"
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends over a group in a step."""

    group: str
    what: str
    num_bytes: int


def stage_traffic(
    config: Config,
    chunks: Sequence[PlannedChunk],
    actions: Sequence[Action],
    message: int,
    update: PlannedUpdate,
) -> tuple[Traffic, ...]:
    """Return what a rank of a stage sends in a step.

    actions: the stage's schedule. message: bytes of a message. update: from plan_update.
    """
    found: Counter[tuple[str, str]] = Counter()
    num_microbatches = sum(action.kind is ActionKind.FORWARD for action in actions) // len(chunks)
    num_sums = num_microbatches if config.parallel.zero_stage == 2 else 1
    for chunk in chunks:
        found["tp", TOKENS] += num_microbatches * chunk.tokens_sent
        for bucket in chunk.buckets:
            name = bucket.replicas.name
            found[name, PARAMETERS] += _sent(bucket, DTYPES[config.train.precision].itemsize)
            found[name, GRADIENTS] += num_sums * _sent(bucket, _gradient_bytes(config, bucket))
            # once a step: the shard's parts with other holders, such as a tied embedding of the first and last stage
            summed = sum(one.stop - one.start for one in bucket.shard_slices() if one.holders.groups)
            for holders in bucket.sum_groups:
                num_bytes = summed * bucket.gradient_dtype.itemsize
                found[holders.name, GRADIENTS] += 2 * (holders.size - 1) * num_bytes // holders.size
    if config.parallel.pp_size > 1:
        found[STAGES, MESSAGES] += message * sum(action.kind in _SENDS for action in actions)
    for group, num_bytes in update.sent.items():
        found[group, UPDATES] += num_bytes
    return tuple(Traffic(group, what, num_bytes) for (group, what), num_bytes in found.items() if num_bytes)


def _sent(bucket: Bucket, element_bytes: int) -> int:
    return (bucket.numel - bucket.shard_numel) * element_bytes


def _gradient_bytes(config: Config, bucket: Bucket) -> int:
    return 2 if config.parallel.grad_reduce_dtype == "bf16" else bucket.gradient_dtype.itemsize
