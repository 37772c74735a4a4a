"""All consequences of a label are in one table."""

from __future__ import annotations

import ast

from megatrain_job.failures.verdict import LABELS, Label, label_row
from tests.helpers.source_tree import ROOT, naming, nodes, python_files, relative

TABLE = ROOT / "launcher" / "megatrain_job" / "failures" / "verdict.py"


def test_every_label_has_a_row() -> None:
    assert set(LABELS) == set(Label)


def test_the_runbook_of_each_label_is_there() -> None:
    pages = {page for label in Label if (page := label_row(label).runbook)}
    assert [page for page in pages if not (ROOT / "docs" / "runbooks" / page).is_file()] == []


def test_unknown_label_counts_against_no_host() -> None:
    # A failure without a label counts: its log shows no cause, as when a process is killed. A label that is missing
    # from the table is a cause that some program did find, and nothing shows that the host is at fault.
    assert label_row("") is LABELS[Label.BENIGN]
    assert label_row("").counts_against_host
    for label in ("unknown", "a_label_of_a_later_version"):
        row = label_row(label)
        assert (row.counts_against_host, row.is_failure, row.is_sign_of_loss) == (False, True, False), label


def test_code_outside_the_table_lists_and_compares_no_labels() -> None:
    files = [path for path in python_files("launcher") if "rules" not in path.parts and path != TABLE]
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in naming(files, "Label")
        for node in nodes(path, ast.Compare, ast.Tuple, ast.List, ast.Set)
        if (isinstance(node, ast.Compare) and any(map(_is_label, [node.left, *node.comparators])))
        or (isinstance(node, ast.Tuple | ast.List | ast.Set) and sum(map(_is_label, node.elts)) > 1)
    ]
    assert found == []


def _is_label(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Label"
