"""What follows from a label stands in one table."""

from __future__ import annotations

from megatrain_job.failures.verdict import LABELS, Label, label_row
from tests.helpers.source_tree import ROOT


def test_every_label_has_a_row() -> None:
    assert set(LABELS) == set(Label)


def test_the_runbook_of_each_label_is_there() -> None:
    pages = {page for label in Label if (page := label_row(label).runbook)}
    assert [page for page in pages if not (ROOT / "docs" / "runbooks" / page).is_file()] == []


def test_unknown_label_counts_as_benign() -> None:
    assert label_row("") is label_row("a_label_of_a_later_version") is LABELS[Label.BENIGN]
