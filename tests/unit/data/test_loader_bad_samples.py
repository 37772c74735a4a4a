"""Samples that are replaced, in the ring of a host's data loader: ranks get them as if they had read for themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.data import DataConfig
from megatrain.contracts.layout import Layout
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.loader.slot_content import Reasons
from tests.helpers.host_loading import VOCAB_SIZE, content, corpus, filled_steps, new_ring, read_alone, steps

NUM_STEPS = 4


@pytest.mark.parametrize("has_document_mask", [False, True])
def test_replaced_samples_pass_the_ring(tmp_path: Path, has_document_mask: bool) -> None:
    """The text has token ids above the vocabulary of the model, so most samples are bad."""
    data = corpus(tmp_path, has_document_mask=has_document_mask, vocab_size=VOCAB_SIZE - 5)
    reader, layout = replace(data.reader, replaces_bad_samples=True), Layout(dp_size=2)
    plan = loader_plan(reader, data.stream, steps(layout, NUM_STEPS), layout, range(2), DataConfig(prefetch=1))
    plan = LoaderPlan.from_json(plan.to_json().encode(), "plan")
    ring, loader = new_ring(plan)
    alone = [list(read_alone(reader, plan.steps, layout, rank)) for rank in range(2)]
    for step, step_plan in filled_steps(plan, ring, loader):
        for rank in range(2):
            found = ring.read(rank, step, step_plan, reader.source_names)
            assert content(found) == content(alone[rank][step])
    num_bad = [len(batch.bad_samples) for batches in alone for batch in batches]
    assert 0 < sum(num_bad) < sum(batch.global_batch_size // 2 for batch in alone[0]) * 2


def test_reasons_that_do_not_fit_are_left_out() -> None:
    """A slot that is used again holds the reasons of its new step only."""
    reasons = Reasons(memoryview(bytearray(64)))
    reasons.put({3: "a" * 40, 4: "b" * 40, 5: "c"})
    assert reasons.read() == {3: "a" * 40, 5: "c"}
    reasons.put({7: None})
    assert reasons.read() == {7: None}
    none = Reasons(memoryview(b""))
    none.put({1: "a"})
    assert none.read() == {}
