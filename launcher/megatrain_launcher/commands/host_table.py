"""Hosts as a table, and the findings of their health checks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.commands.printing import table
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport
from megatrain.formatting.lists import ranges_text
from megatrain.formatting.quantities import age_text, seconds_text
from megatrain.formatting.terminal import short
from megatrain_job.jobs.host_view import HostView

_COLUMNS = ("host", "state", "ranks", "step", "step time", "last step", "")
_MAX_REMARK_CHARS = 160


def host_lines(views: Sequence[HostView], now_s: float) -> list[str]:
    """Return a table with a line for each host."""
    return table([_COLUMNS, *(_row(view, now_s) for view in views)], left=(0, 1, 2, 6))


def _row(view: HostView, now_s: float) -> tuple[str, ...]:
    status = view.status
    step = median = last = "-"
    if status is not None and view.part is not None:
        step = _steps(status.min_step, status.max_step)
        median = "-" if status.median_step_s is None else seconds_text(status.median_step_s)
        last = "-" if status.last_step_unix_s is None else f"{age_text(status.last_step_unix_s, now_s)} ago"
    remark = "; ".join(text for text in ("driver" if view.is_driver else "", view.remark) if text)
    return (
        view.host, str(view.state), ranges_text(view.ranks) or "-", step, median, last, short(remark, _MAX_REMARK_CHARS)
    )  # fmt: skip


def _steps(least: int | None, most: int | None) -> str:
    if least is None:
        return "-"
    return f"{least:,}" if most is None or most == least else f"{least:,}-{most:,}"


def check_lines(reports: Sequence[CheckReport]) -> list[str]:
    """Return the findings of health checks: a line for each host, and below it the checks that it did not pass."""
    lines: list[str] = []
    for report in reports:
        counts = {outcome: sum(result.outcome is outcome for result in report.results) for outcome in CheckOutcome}
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing was checked"
        lines.append(f"{report.host}: {'fit' if report.is_fit else 'NOT FIT'}: {summary}")
        worth_a_line = [result for result in report.results if result.outcome is not CheckOutcome.PASSED]
        if worth_a_line:
            rows = [(f"  {one.name}", str(one.outcome), short(one.detail)) for one in worth_a_line]
            lines += table(rows, left=(0, 1, 2))
    return lines
