"""Query parameters that several routes share: round, steps, lists of ranks and hosts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from megatrain_dashboard.responses.errors import bad_query, not_found
from megatrain_dashboard.sources.facts import JobFacts

LARGEST_NUMBER = 2**31 - 1
"""The largest step, round or rank that a query may name."""
_MAX_RANKS = 1_000_000
_MAX_HOSTS = 1000

RoundNumber = Annotated[int | None, Query(alias="round", ge=0, le=LARGEST_NUMBER)]
Step = Annotated[int | None, Query(ge=0, le=LARGEST_NUMBER)]
From = Annotated[
    str,
    Query(alias="from", max_length=40, description="a step, a time such as 2026-11-23T09:30:00Z, or -15m, -6h, -1d"),
]
To = Annotated[str, Query(alias="to", max_length=40, description="a step, or a time; empty: no end")]


def check_steps(first: int | None, last: int | None) -> None:
    """Check the order of the steps. Raises: RefusalError where the last step is before the first."""
    if first is not None and last is not None and first > last:
        raise bad_query("last", last, f"it must not be before first={first}")


def check_round(facts: JobFacts, round_number: int | None) -> None:
    """Check that a round exists. Raises: RefusalError where no rank reported it."""
    known = [round_.number for round_ in facts.rounds]
    if round_number is not None and round_number not in known:
        there = ", ".join(map(str, known)) or "none"
        raise not_found(f"round={round_number}: no rank reported it; there are {there}")


def rank_list(text: str, most: int = _MAX_RANKS) -> tuple[int, ...] | None:
    """Return the ranks that "0:7,16" or "0-7,16" names, both ends included, at most `most`; None for an empty text.

    Raises: RefusalError.
    """
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first_text, has_colon, last_text = part.strip().replace("-", ":").partition(":")
        bounds = [_number(text, first_text), _number(text, last_text) if has_colon else _number(text, first_text)]
        if bounds[0] > bounds[1]:
            raise bad_query("ranks", text, f"{part.strip()!r} ends before it begins")
        if bounds[1] - bounds[0] + len(found) >= most:
            raise bad_query("ranks", text, f"it names more than {most:,} ranks")
        found.update(range(bounds[0], bounds[1] + 1))
    return tuple(sorted(found))


def host_list(text: str) -> tuple[str, ...] | None:
    """Return the hosts that "host-1,host-2" names; None for an empty text. Raises: RefusalError."""
    if not text:
        return None
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if len(found) > _MAX_HOSTS:
        raise bad_query("hosts", text, f"it names more than {_MAX_HOSTS:,} hosts")
    return found


def _number(whole: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > LARGEST_NUMBER:
        raise bad_query("ranks", whole, 'expected numbers and FIRST:LAST with commas between, as "0:7,16"')
    return int(text)
