"""GET /job: the identity of the job, and the rights of the caller.

The page reads it when it opens, and after each reconnection.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import megatrain
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain_dashboard.actions.checks import why_not_act
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import document_response
from megatrain_dashboard.responses.document import Document, LayoutDocument, layout_document
from megatrain_dashboard.security.roles import Proof, caller_of
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.timeline import lane_of


class RoundDocument(Document):
    """A round that ranks reported, with the range of its streamed steps."""

    number: int
    began_unix_s: float | None
    world_size: int
    first_step: int | None
    last_step: int | None


class OperationDocument(Document):
    """A kind of span that the heat map and the timeline can show."""

    name: str
    number: int
    lane: str
    """compute, tp, pp-send, pp-recv, dp, host, data-loader or pictures."""
    is_exchange: bool


class JobDocument(Document):
    """The response of /job."""

    job: str
    run_directory: str
    is_recorded: bool
    """Whether this is the history of a run, without its etcd: nothing changes and no action is possible."""
    layout: LayoutDocument | None
    rounds: tuple[RoundDocument, ...]
    """The oldest first; the last round is shown unless another is chosen."""
    operations: tuple[OperationDocument, ...]
    role: Literal["viewer", "operator"]
    can_act: bool
    """Whether actions are enabled, the job is live and the caller is an operator."""
    why_not_act: str
    """Empty if `can_act` is true; else a sentence."""
    has_session: bool
    """Whether the caller logged in through the page, and can log out."""
    perfetto_url: str
    """The address of the site's own Perfetto; empty: the trace is downloaded."""
    version: str


JobParts = tuple[LayoutDocument | None, tuple[RoundDocument, ...], tuple[OperationDocument, ...]]


def job_parts(source: JobSource) -> JobParts:
    """Return layout, rounds and operations of a job."""
    try:
        layout = layout_document(source.roster(None).layout)
    except DataError:
        layout = None
    return layout, round_documents(source.facts()), operation_documents()


def round_documents(facts: JobFacts) -> tuple[RoundDocument, ...]:
    """Return the confirmed rounds, the oldest first, with the steps that were streamed for each."""
    reached = {number: (first, last) for number, first, last in facts.series.reached}
    confirmed = [round_ for round_ in facts.rounds if round_.is_confirmed] or list(facts.rounds[-1:])
    return tuple(
        RoundDocument.of(
            round_,
            first_step=reached.get(round_.number, (None, None))[0],
            last_step=reached.get(round_.number, (None, None))[1],
        )
        for round_ in confirmed
    )


def operation_documents() -> tuple[OperationDocument, ...]:
    """Return the kinds of spans, by number."""
    return tuple(
        OperationDocument(
            name=operation.value,
            number=operation.number,
            lane=lane_of(operation),
            is_exchange=operation.is_collective or operation.is_point_to_point,
        )
        for operation in Operation
    )


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the job's identity and the caller's permissions."""
    routes = APIRouter(tags=["job"])

    @routes.get("/job", response_model=JobDocument)
    def job(request: Request) -> Response:
        """Return the identity of the job and the rights of the caller, which a page needs first."""
        caller, source, settings = caller_of(request), parts.source, parts.settings
        reason = why_not_act(caller, is_enabled=settings.enable_actions, is_recorded=source.is_recorded)
        layout, rounds, operations = job_parts(source)
        return document_response(
            JobDocument(
                job=source.job,
                run_directory=str(source.run.root),
                is_recorded=source.is_recorded,
                layout=layout,
                rounds=rounds,
                operations=operations,
                role=caller.role.value,
                can_act=not reason,
                why_not_act=reason,
                has_session=caller.proof is Proof.SESSION,
                perfetto_url=settings.perfetto_url,
                version=megatrain.__version__,
            )
        )

    return routes
