"""The counts, log lines and limit of replaced samples, and how ranks agree on them, without a process for each rank."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.contracts.errors import DataError
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.contracts.layout import Layout
from megatrain.data.bad_tokens import BadSample
from megatrain.data.microbatch import MicroBatch
from megatrain.data.step_batch import StepBatch
from megatrain.reporting import SourceReport
from megatrain.training.bad_samples import REPLACED_IN_A_ROW_LIMIT, BadSamples
from megatrain.training.step import Requests, StepOutcome
from tests.helpers.single_rank import single_rank_mesh

BAD = "code.bin at byte 34 (document 2): cannot be read"


def batch(*samples: BadSample) -> StepBatch:
    return StepBatch(0, 8, [], bad_samples=samples)


def outcome(num_replaced: tuple[int, ...], *used: str) -> StepOutcome:
    sources = tuple(SourceReport(name=name, loss=1.0, num_tokens=5) for name in used)
    return StepOutcome(1.0, 1.0, False, Requests(), sources, 5 * len(used), num_replaced)


def test_own_part_counts_samples_by_source() -> None:
    part = BadSamples(single_rank_mesh(), ["web", "code"]).own_part(batch(BadSample(3, 1, BAD), BadSample(7, 1, None)))
    assert part == (0.0, (0.0, 2.0))


def test_an_address_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = BadSamples(single_rank_mesh(), ["web", "code"])
    with caplog.at_level(logging.WARNING):
        for number in (3, 103):
            samples.after_step(batch(BadSample(number, 1, BAD)), outcome((0, 1), "web", "code"))
    (record,) = caplog.records
    assert record.getMessage() == (
        "data.bad_samples: sample 3 of source code is replaced by one without labels: code.bin at byte 34 "
        "(document 2): cannot be read"
    )


def test_a_source_that_is_bad_throughout_ends_the_run() -> None:
    samples = BadSamples(single_rank_mesh(), ["web", "code"])
    # A usable sample resets the count.
    for used in (("web",), ("web", "code"), ("web",)):
        samples.after_step(batch(), outcome((0, REPLACED_IN_A_ROW_LIMIT - 1), *used))
    with pytest.raises(DataError, match=f"code: {REPLACED_IN_A_ROW_LIMIT} samples in a row cannot be used"):
        samples.after_step(batch(), outcome((0, 1), "web"))


LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)
REPLICAS = ((20, 22, 24), (21, 23, 25))
"""The samples of each replica."""


def rank_batch(rank: int, bad: set[int]) -> StepBatch:
    """Return the batch of a rank, one sample in each micro-batch."""
    numbers = REPLICAS[LAYOUT.sample_share(rank)[0]]
    micros = [
        MicroBatch(
            np.full((4, 1), 0 if is_bad else 7), np.full((4, 1), IGNORED_LABEL if is_bad else 7), None,
            np.array([number]), np.array([0 if is_bad else 4]), 16, int(not is_bad),
        )
        for number, is_bad in zip(numbers, (number in bad for number in numbers), strict=True)
    ]  # fmt: skip
    found = tuple(BadSample(number, 0, BAD) for number in numbers if number in bad)
    return StepBatch(20, 6, micros, bad_samples=found)


@pytest.mark.parametrize("rank", [None, 0, 1, 6, 7])
def test_peers_that_differ_replace_what_any_cannot_read(rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank can read samples 20 and 25; one rank also cannot read the second sample of its replica."""
    ranks = range(LAYOUT.world_size)
    bad = [{20, 25} | ({REPLICAS[LAYOUT.sample_share(one)[0]][1]} if one == rank else set()) for one in ranks]
    batches = [rank_batch(one, bad[one]) for one in ranks]
    of_rank = [BadSamples(replace(single_rank_mesh(), layout=LAYOUT, rank=one), ["code"]) for one in ranks]
    parts = [samples.own_part(batch) for samples, batch in zip(of_rank, batches, strict=True)]
    assert (sum(part.difference for part in parts) == 0.0) == (rank is None)

    flags: list[Tensor] = []

    def keep(mesh: Mesh, x: Tensor) -> Tensor:
        flags.append(x.clone())
        return x

    monkeypatch.setattr(Mesh, "sum_over_all", keep)
    for samples, batch in zip(of_rank, batches, strict=True):
        samples.agreed(batch, 26)
    monkeypatch.setattr(Mesh, "sum_over_all", lambda mesh, x: torch.stack(flags).sum(0))
    agreed = [samples.agreed(batch, 26) for samples, batch in zip(of_rank, batches, strict=True)]
    union: set[int] = set().union(*bad)
    for one, batch in enumerate(agreed):
        expected = rank_batch(one, union)
        assert {sample.number for sample in batch.bad_samples} == {sample.number for sample in expected.bad_samples}
        assert batch.num_label_tokens == expected.num_label_tokens
        for micro, other in zip(batch.microbatches, expected.microbatches, strict=True):
            assert np.array_equal(micro.labels_SB, other.labels_SB)
            assert np.array_equal(micro.tokens_SB, other.tokens_SB)
    parts = [samples.own_part(batch) for samples, batch in zip(of_rank, agreed, strict=True)]
    assert sum(part.difference for part in parts) == 0.0
    assert sum(part.by_source[0] for part in parts) == len(union)
