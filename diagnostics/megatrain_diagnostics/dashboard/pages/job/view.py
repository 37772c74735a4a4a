"""/job: the layout, the rounds and the kinds of spans that pages ask about."""

from __future__ import annotations

from megatrain.contracts.errors import DataError
from megatrain.contracts.operations import Operation
from megatrain_diagnostics.analysis.timeline import lane_of
from megatrain_diagnostics.dashboard.answers.document import LayoutDocument, layout_document
from megatrain_diagnostics.dashboard.pages.job.document import OperationDocument, RoundDocument
from megatrain_diagnostics.dashboard.sources.facts import JobFacts
from megatrain_diagnostics.dashboard.sources.protocol import JobSource

JobParts = tuple[LayoutDocument | None, tuple[RoundDocument, ...], tuple[OperationDocument, ...]]


def job_facts(source: JobSource) -> JobParts:
    """Return layout, rounds and operations of a job."""
    try:
        layout = layout_document(source.roster(None).layout)
    except DataError:
        layout = None
    return layout, round_documents(source.facts()), operation_documents()


def round_documents(facts: JobFacts) -> tuple[RoundDocument, ...]:
    """Return the rounds that are believed, the oldest first, with the steps that were streamed of them."""
    reached = {number: (first, last) for number, first, last in facts.series.reached}
    believed = [one for one in facts.rounds if one.is_believed] or list(facts.rounds[-1:])
    return tuple(
        RoundDocument(
            number=one.number,
            began_unix_s=one.began_unix_s,
            world_size=one.world_size,
            first_step=reached.get(one.number, (None, None))[0],
            last_step=reached.get(one.number, (None, None))[1],
        )
        for one in believed
    )


def operation_documents() -> tuple[OperationDocument, ...]:
    """Return the kinds of spans, by number."""
    return tuple(
        OperationDocument(
            name=one.value,
            number=one.number,
            lane=lane_of(one),
            is_exchange=one.is_collective or one.is_point_to_point,
        )
        for one in Operation
    )
