"""Reads steps as all replicas of a run, and returns their samples by number."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.config import Config
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.reader import BatchReader, ReadSlots
from megatrain.data.step_batch import StepBatch
from megatrain.training.training_data import open_reader


def read(reader: BatchReader, cursor: int, size: int, num_replicas: int = 1) -> list[StepBatch]:
    plan = StepPlan(cursor, size, 2, Dealing(size // 2, num_replicas, 1))
    return [reader.read_step(plan, replica) for replica in range(num_replicas)]


def read_configured(config: Config, step: int = 0, **options: bool) -> list[StepBatch]:
    """Return the parts of all replicas of a step of a run. options: of BatchReader.read_step."""
    layout = config.layout(None)
    plan = list(config.steps(layout, 0, step + 1).plans())[step]
    return [open_reader(config).read_step(plan, replica, **options) for replica in range(layout.num_sample_parts)]


def by_sample(batches: Sequence[StepBatch | ReadSlots]) -> dict[int, tuple[list[int], list[int], bytes]]:
    """Return tokens, labels and patches of each sample, by its number in the run; no patches without a picture."""
    found = {}
    for micro in (micro for batch in batches for micro in batch.microbatches):
        patches_of = {}
        if micro.patches_PKC is not None and micro.picture_place_K is not None:
            pictures = micro.patches_PKC.swapaxes(0, 1)
            patches_of = {
                place: one.tobytes() for place, one in zip(micro.picture_place_K.tolist(), pictures, strict=True)
            }
        for place, number in enumerate(micro.sample_B.tolist()):
            if number >= 0:
                columns = micro.tokens_SB[:, place].tolist(), micro.labels_SB[:, place].tolist()
                found[number] = (*columns, patches_of.get(place, b""))
    return found
