"""A black box of version 1, whose header had three sizes instead of a list of axes, tells the same layout.

tests/golden/former-axes was written by the last program that wrote so, and is never written anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatrain.contracts.black_box import read_black_box, write_control
from megatrain.contracts.black_box_values import ControlPage
from megatrain.contracts.layout import Layout
from tests.helpers.source_tree import ROOT

FORMER = ROOT / "tests" / "golden" / "former-axes" / "rank-00005.blackbox"


def test_the_layout_of_a_former_header_is_read() -> None:
    box = read_black_box(FORMER)
    assert box.identity.layout == Layout(tp_size=2, pp_size=2, dp_size=2)
    assert dict(box.identity.coordinate) == {"pp": 1, "dp": 0, "tp": 1}
    assert (box.identity.rank, box.identity.round, box.identity.host) == (5, 3, "host-2")
    assert [(group.name, tuple(group.ranks)) for group in box.groups.values()] == [("dp", (5, 7))]
    assert [record.operation for record in box.records] == ["dp-all-reduce"]


def test_a_former_box_takes_commands(tmp_path: Path) -> None:
    shutil.copy(FORMER, tmp_path)
    write_control(tmp_path / FORMER.name, ControlPage(round=4))
    control = read_black_box(tmp_path / FORMER.name).control
    assert control is not None
    assert control.round == 4
