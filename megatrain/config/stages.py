"""Section [data_stage]: the later stages of a run, and where they begin.

There may be several stages: two tables [[data_stage]] are the sections [data_stage] and [data_stage-2].

A stage begins after a number of tokens. With samples of one length, its first sample follows by a division. All samples
of a step have one length, so a stage that changes the length begins with the first step after its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.config.batch import LARGEST_BATCH, BatchConfig, BatchSchedule, BatchStage
from megatrain.config.data import MAX_WEIGHT, MIN_WEIGHT
from megatrain.config.options import option
from megatrain.contracts.sample_ranges import SampleRanges, num_kept

_WEIGHT = re.compile(r"(\d+(?:\.\d*)?)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStageConfig:
    """A later stage of the run: after a number of tokens, the weights of the sources, the batch size or the sample
    length change.

    There may be up to 256: two tables `[[data_stage]]` are the same as `[data_stage]` and `[data_stage-2]`. Until the
    first stage begins, the weights in [data_source], batch.global_batch_size and data.seq_len apply. Stages may be
    changed at any restart, without an effect on what the run has already read; changes of the length that have begun
    must stay.
    """

    after_tokens: int = option(
        0,
        "Tokens that the run has read when the stage begins, rounded up to whole samples, and to whole steps if "
        "the stage changes the sample length. Tokens that a rollback skips are counted, too.",
        unit="tokens",
        minimum=0,
    )
    weights: str = option(
        "",
        'Weights of the sources by name: "NAME=WEIGHT, NAME=WEIGHT". A source that is not named gets no samples. '
        "Empty: the weights of the stage before.",
    )
    global_batch_size: int = option(
        0,
        "Sequences in one optimizer step, from the first step on that begins in the stage; a multiple of "
        "batch.micro_batch_size. 0: as many as in the stage before.",
        unit="sequences",
        minimum=0,
        maximum=LARGEST_BATCH,
    )
    seq_len: int = option(
        0,
        "Tokens of a training sample; at most model.seq_len. 0: as many as in the stage before.",
        unit="tokens",
        minimum=0,
    )

    @property
    def has_effect(self) -> bool:
        return bool(self.weights or self.global_batch_size or self.seq_len)

    @property
    def weight_of(self) -> Mapping[str, float]:
        """Source name -> weight. Raises: ValueError with the part that is not NAME=WEIGHT or repeats a name."""
        found: dict[str, float] = {}
        for part in self.weights.split(","):
            name, equals, text = (piece.strip() for piece in part.rpartition("="))
            weight = _weight(text)
            if not equals or not name or weight is None or name in found:
                raise ValueError(part.strip())
            found[name] = weight
        return found


def _weight(text: str) -> float | None:
    """Return the weight in a text, None if it is neither 0 nor from MIN_WEIGHT to MAX_WEIGHT."""
    match = _WEIGHT.fullmatch(text)
    if match is None:
        return None
    # float() also returns 0.0 for a number that is too small, so the digits show whether it is 0
    is_zero = not match[1].strip("0.")
    weight = float(text)
    return weight if is_zero or MIN_WEIGHT <= weight <= MAX_WEIGHT else None


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage, its first sample in a run that leaves out no samples, and the tokens of each of its samples.

    first_token: how many tokens such a run has read before the stage. changes_length: the samples of the stage before
    have another length.
    """

    stage: DataStageConfig
    first_sample: int
    first_token: int
    seq_len: int
    changes_length: bool


def placed_stages(stages: Sequence[DataStageConfig], batch: BatchConfig, seq_len: int) -> tuple[PlacedStage, ...]:
    """Return where stages, sorted by their tokens, begin. seq_len: the tokens of a sample before them.

    A stage whose tokens are reached before the previous stage begins starts together with that stage.
    """
    found: list[PlacedStage] = []
    sample = token = 0  # the last change of the length
    batches = BatchSchedule(batch)
    for stage in stages:
        first = sample + max(0, -(-(stage.after_tokens - token) // seq_len))
        changes_length = stage.seq_len not in (0, seq_len)
        if changes_length:
            first = step_begin(batches, 0, first, ())
        first_token = token + (first - sample) * seq_len
        if changes_length:
            sample, token, seq_len = first, first_token, stage.seq_len
        if stage.global_batch_size:
            batches = BatchSchedule(batch, (*batches.stages, BatchStage(first, stage.global_batch_size)))
        found.append(PlacedStage(stage, first, first_token, seq_len, changes_length))
    return tuple(found)


def step_begin(batches: BatchSchedule, cursor: int, sample: int, skipped: SampleRanges) -> int:
    """Return `sample` if no step from `cursor` on crosses it, else the first sample after that step.

    sample: not before the cursor. skipped: the samples that the run leaves out.
    """
    end = batches.cursor_after(cursor, batches.steps_before(sample, cursor, skipped), skipped)
    return end if end > sample and num_kept(sample, end, skipped) else sample
