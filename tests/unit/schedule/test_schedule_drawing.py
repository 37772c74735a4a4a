"""The text drawing, and the drawings and lists of the guide, which must agree with the code."""

from __future__ import annotations

from megatrain.schedule import ChunkPlacement, build_schedule, forward_only, render
from tests.helpers.markdown import fenced_blocks
from tests.helpers.source_tree import ROOT

GUIDE_BLOCKS = [block.text for block in fenced_blocks((ROOT / "docs/guides/schedules.md").read_text(encoding="utf-8"))]


def test_drawing_of_1f1b() -> None:
    assert render(build_schedule("1f1b", 3, 1, 4)).splitlines() == [
        "stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]


def test_dgrad_and_wgrad_have_letters_of_their_own() -> None:
    assert render(build_schedule("zero_bubble", 3, 1, 4)).splitlines() == [
        "stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_single_stage_has_no_idle_slot() -> None:
    assert render(build_schedule("gpipe", 1, 1, 3)) == "stage 0 | F0 F1 F2 B0 B1 B2"


def test_drawing_of_an_evaluation() -> None:
    assert render(forward_only(ChunkPlacement(2, 2), 2)).splitlines() == [
        "stage 0 | F0a F1a F0b F1b .",
        "stage 1 | .   F0a F1a F0b F1b",
    ]


def test_columns_line_up_with_many_stages_and_microbatches() -> None:
    rows = render(build_schedule("interleaved", 11, 2, 22)).splitlines()
    assert len(rows) == 11
    assert {row.index("|") for row in rows} == {len("stage 10 ")}
    assert rows[0].startswith("stage 0  | F0a  F1a  F2a")
    assert max(map(len, rows)) == len(rows[0])


def test_more_chunks_than_letters_are_numbered() -> None:
    rows = render(build_schedule("interleaved", 2, 27, 2)).splitlines()
    assert rows[0].startswith("stage 0 | F0.0  F1.0  F0.1  F1.1  F0.2")
    assert "F0.26 B0.26 F1.26 B1.26 B0.25" in rows[1]


def test_guide_draws_what_the_code_builds() -> None:
    for sizes in (("1f1b", 4, 1, 6), ("zero_bubble", 4, 1, 6), ("interleaved", 2, 2, 4), ("interleaved", 2, 2, 5)):
        assert render(build_schedule(*sizes)) in GUIDE_BLOCKS, sizes


def test_guide_lists_the_actions_that_the_code_builds() -> None:
    for actions in build_schedule("interleaved", 2, 2, 2).stages:
        assert "\n".join(map(str, actions)) in GUIDE_BLOCKS
