"""The one table of Xid numbers, and the runbook that shows it."""

from __future__ import annotations

import re

import pytest

from megatrain.failures.xids import CLEAN_UP, HANDLED, PROGRAM_FAULT, XIDS, XidKind, xid_of
from tests.helpers.source_tree import ROOT

ROW = re.compile(r"^\| (\d[\d, ]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
KIND_IN_RUNBOOK = {**{kind: str(kind) for kind in XidKind}, XidKind.HANDLED: "handled by the GPU driver"}


def test_the_runbook_has_every_number() -> None:
    text = (ROOT / "docs/runbooks/gpu-errors.md").read_text()
    told = {
        int(number): (meaning, kind, advice)
        for numbers, meaning, kind, advice in ROW.findall(text)
        for number in numbers.split(",")
    }
    assert told == {number: (one.meaning, KIND_IN_RUNBOOK[one.kind], one.advice) for number, one in XIDS.items()}


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (79, XidKind.HARDWARE),
        (31, XidKind.PROGRAM),
        (45, XidKind.CLEAN_UP),
        (94, XidKind.HANDLED),
        (9999, XidKind.HARDWARE),
    ],
)
def test_whose_error_it_is(number: int, kind: XidKind) -> None:
    assert xid_of(number).kind is kind


def test_no_number_is_of_two_kinds() -> None:
    assert len(PROGRAM_FAULT | CLEAN_UP | HANDLED) == len(PROGRAM_FAULT) + len(CLEAN_UP) + len(HANDLED)
    assert all(one.number == number and one.advice for number, one in XIDS.items())
