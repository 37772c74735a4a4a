"""What follows from a label stands in one table."""

from __future__ import annotations

import pytest

from megatrain_job.failures.verdict import LABELS, Label, label_row
from tests.helpers.source_tree import ROOT


def test_every_label_has_a_row() -> None:
    assert set(LABELS) == set(Label)


@pytest.mark.parametrize("label", Label)
def test_the_runbook_of_a_label_is_there(label: Label) -> None:
    page = label_row(label).runbook
    assert not page or (ROOT / "docs" / "runbooks" / page).is_file()


@pytest.mark.parametrize("label", ["", "a_label_of_a_later_version"])
def test_unknown_label_counts_as_benign(label: str) -> None:
    assert label_row(label) is LABELS[Label.BENIGN]
