"""Which checkpoints are kept must be possible."""

from __future__ import annotations


def test_steps_that_match_keep_every_by_chance_are_not_kept(problems_of) -> None:
    expected = (
        "checkpoint.keep_every=100 needs checkpoint.interval, found 0: checkpoints that are taken by time fall on any "
        "step; use interval=100 or keep_every=0 (--checkpoint.keep_every on the command line)"
    )
    assert problems_of("--checkpoint.keep_every=100") == (expected,)
    assert problems_of("--checkpoint.keep_every=100", "--checkpoint.interval=50", "--checkpoint.keep_last=2") == ()
