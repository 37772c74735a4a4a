"""Make the parts of /job: the layout, the rounds and the kinds of spans."""

from __future__ import annotations

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.job.document import OperationDocument, RoundDocument
from megatrain_dashboard.responses.document import LayoutDocument, layout_document
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.timeline import lane_of

JobParts = tuple[LayoutDocument | None, tuple[RoundDocument, ...], tuple[OperationDocument, ...]]


def job_facts(source: JobSource) -> JobParts:
    """Return layout, rounds and operations of a job."""
    try:
        layout = layout_document(source.roster(None).layout)
    except DataError:
        layout = None
    return layout, round_documents(source.facts()), operation_documents()


def round_documents(facts: JobFacts) -> tuple[RoundDocument, ...]:
    """Return the confirmed rounds, the oldest first, with the steps that were streamed for each."""
    reached = {number: (first, last) for number, first, last in facts.series.reached}
    confirmed = [one for one in facts.rounds if one.is_confirmed] or list(facts.rounds[-1:])
    return tuple(
        RoundDocument(
            number=one.number,
            began_unix_s=one.began_unix_s,
            world_size=one.world_size,
            first_step=reached.get(one.number, (None, None))[0],
            last_step=reached.get(one.number, (None, None))[1],
        )
        for one in confirmed
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
