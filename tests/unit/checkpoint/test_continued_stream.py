"""Sources of a run that resumes: recognized by content, then by name; a new mixture begins at the cursor."""

from __future__ import annotations

from dataclasses import replace

from megatrain.checkpoint.continued_stream import continued_stream, with_later_stages
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.sample_ranges import SampleRanges

WEB = StreamSource("web", 5000, "a" * 32)
CODE = StreamSource("code", 3000, "b" * 32)
BOOKS = StreamSource("books", 2000, "c" * 32)
BEFORE = SampleStream(7, (WEB, CODE), (MixtureStage(0, (3, 1), 16),), skipped=((80, 96),), tokenizer_digest="e" * 64)


def stream(*sources: tuple[StreamSource, int], seed: int = 7) -> SampleStream:
    """Return the stream that a configuration with these sources and weights describes."""
    return SampleStream(
        seed, tuple(source for source, _ in sources), (MixtureStage(0, tuple(weight for _, weight in sources), 16),)
    )


def test_the_same_mixture_continues_without_a_new_stage() -> None:
    for case, now in {
        "same": stream((WEB, 3), (CODE, 1)),
        "in another order": stream((CODE, 1), (WEB, 3)),
        "weights in the same proportion": stream((WEB, 9), (CODE, 3)),
    }.items():
        found = continued_stream(BEFORE, now, cursor=400)
        assert (found.stream, found.notes, found.problem) == (replace(BEFORE, tokenizer_digest=""), (), ""), case


CHANGED = {
    "other weights": (stream((WEB, 1), (CODE, 1)), (WEB, CODE), (1, 1), "web 50 %, code 50 %"),
    "one more": (stream((BOOKS, 2), (WEB, 3), (CODE, 1)), (WEB, CODE, BOOKS), (3, 1, 2), "books 33.33 %"),
    "one less": (stream((WEB, 1)), (WEB, CODE), (1, 0), "web 100 %"),
    "one replaced": (stream((WEB, 3), (BOOKS, 1)), (WEB, CODE, BOOKS), (3, 0, 1), "web 75 %, books 25 %"),
}


def test_another_mixture_begins_at_the_cursor() -> None:
    for case, (now, sources, weights, text) in CHANGED.items():
        found = continued_stream(BEFORE, now, cursor=400)
        assert found.problem == "", case
        assert found.stream.sources == sources, case
        assert found.stream.stages == (MixtureStage(0, (3, 1), 16), MixtureStage(400, weights, 16)), case
        assert found.stream.skipped == BEFORE.skipped
        (note,) = found.notes
        assert note.startswith("from sample 400 on, the mixture is")
        assert text in note


def test_a_stage_that_got_no_sample_is_replaced() -> None:
    before = replace(BEFORE, stages=(MixtureStage(0, (3, 1), 16), MixtureStage(400, (1, 1), 16)))
    found = continued_stream(before, stream((WEB, 1), (CODE, 2)), cursor=400)
    assert found.stream.stages == (MixtureStage(0, (3, 1), 16), MixtureStage(400, (1, 2), 16))
    at_start = continued_stream(replace(BEFORE, skipped=()), stream((WEB, 1), (CODE, 2)), cursor=0)
    assert at_start.stream.stages == (MixtureStage(0, (1, 2), 16),)


def test_a_source_that_comes_back_keeps_its_place() -> None:
    without = continued_stream(BEFORE, stream((WEB, 1)), cursor=400).stream
    found = continued_stream(without, stream((CODE, 1), (WEB, 1)), cursor=600).stream
    assert found.sources == (WEB, CODE)
    assert found.stages[1:] == (MixtureStage(400, (1, 0), 16), MixtureStage(600, (1, 1), 16))


def test_content_decides_before_the_name() -> None:
    """The files were moved, and another source took the name of one of them."""
    now = stream((replace(BOOKS, name="web"), 1), (replace(WEB, name="web-2"), 3), (CODE, 1))
    found = continued_stream(BEFORE, now, cursor=400).stream
    assert found.sources == (replace(WEB, name="web-2"), CODE, replace(BOOKS, name="web"))


def test_changed_content_is_refused_unless_it_is_accepted() -> None:
    new_web, new_code = replace(WEB, digest="1" * 32), replace(CODE, digest="2" * 32)
    now = stream((new_web, 3), (new_code, 1))
    problem = continued_stream(BEFORE, now, cursor=400).problem
    assert problem == (
        f"web had 5000 tokens with digest {WEB.digest}, and web has 5000 tokens with digest {new_web.digest}, so its "
        "consumed samples are unknown; to use these data as another source: a [[data_source]] with another name; to "
        f"use them at the same cursor: data.accepted_digest={new_web.digest}"
    )
    assert "code had" in continued_stream(BEFORE, now, 400, accepted=[new_web.digest]).problem
    found = continued_stream(BEFORE, now, 400, accepted=[new_web.digest, new_code.digest])
    assert found.stream.sources == (new_web, new_code)
    assert len(found.notes) == 2
    longer = stream((replace(new_web, num_tokens=5001), 3), (CODE, 1))
    problem = continued_stream(BEFORE, longer, 400, accepted=[new_web.digest]).problem
    assert "5001 tokens" in problem
    assert "accepted_digest" not in problem


def test_another_seed_is_another_order() -> None:
    found = continued_stream(BEFORE, stream((WEB, 3), (CODE, 1), seed=8), cursor=400)
    assert found.problem == "its samples were drawn with seed 7, and data.seed is 8"


LATER = continued_stream(BEFORE, stream((WEB, 1), (CODE, 1), (BOOKS, 1)), cursor=400).stream
"""The mixture changed at sample 400."""


def test_pictures_that_are_made_in_another_way_are_refused() -> None:
    made = "DALI 2.4.0 cpu, at most 100 pixels, tokenizer abc"
    cases = [(made, made.replace("2.4.0", "2.5.0")), (made, ""), ("", made)]
    for before, now in cases:
        pair = replace(BEFORE, pictures=before), replace(stream((WEB, 3), (CODE, 1)), pictures=now)
        texts = [f"pictures from shards, made by {one}" if one else "no pictures from shards" for one in (before, now)]
        expected = f"it had {texts[0]}, and now has {texts[1]}: pixels or tokens would differ"
        assert continued_stream(*pair, cursor=400).problem == expected
    same = replace(BEFORE, pictures=made), replace(stream((WEB, 3), (CODE, 1)), pictures=made)
    assert continued_stream(*same, cursor=400).problem == ""


def test_going_back_to_skip_samples_keeps_the_stages_before_them() -> None:
    """Otherwise the numbers of samples that a rollback skips would refer to other samples."""
    found = with_later_stages(BEFORE, LATER, 300)
    assert (found.sources, found.stages, found.skipped) == (LATER.sources, LATER.stages, BEFORE.skipped)
    skips = replace(found, skipped=((450, 500),))
    resumed = continued_stream(skips, stream((WEB, 1), (CODE, 1), (BOOKS, 1)), cursor=300)
    assert resumed.stream.stages == LATER.stages
    assert resumed.notes[0].startswith("from sample 400 on, the mixture is web 33.33 %")
    elsewhere = replace(LATER, stages=(MixtureStage(0, (9, 9), 16),))
    assert with_later_stages(BEFORE, elsewhere, 300) == BEFORE
    assert with_later_stages(BEFORE, None, 300) == BEFORE


def test_going_back_without_skips_forgets_stages_that_are_ahead() -> None:
    resumed = continued_stream(with_later_stages(BEFORE, LATER, 300), stream((WEB, 1), (CODE, 1)), cursor=300)
    assert resumed.stream.stages == (MixtureStage(0, (3, 1), 16), MixtureStage(300, (1, 1, 0), 16))


def test_another_mixture_begins_behind_the_samples_to_skip() -> None:
    """Numbers of skipped samples refer to the previous mixture."""
    skips = replace(BEFORE, skipped=((80, 96), (700, 900)))
    found = continued_stream(skips, stream((WEB, 1), (CODE, 1)), cursor=500)
    assert found.stream.stages == (MixtureStage(0, (3, 1), 16), MixtureStage(900, (1, 1), 16))
    assert found.notes == ("from sample 900 on, the mixture is web 50 %, code 50 %, in samples of 16 tokens",)
    assert continued_stream(found.stream, stream((WEB, 1), (CODE, 1)), cursor=900).notes == ()


PLAN = (MixtureStage(0, (3, 1), 16), MixtureStage(600, (1, 1), 16), MixtureStage(900, (0, 1), 16))
PLANNED = replace(BEFORE, stages=PLAN, skipped=(), tokenizer_digest="")


def test_planned_stages_stay_wherever_a_run_resumes() -> None:
    for cursor in (0, 1, 599, 600, 601, 900, 5000):
        found = continued_stream(PLANNED, PLANNED, cursor)
        assert found.stream == PLANNED, cursor
        assert len(found.notes) == sum(stage.first_sample > cursor for stage in PLAN), cursor


def test_plan_that_changes_does_so_from_the_cursor_on() -> None:
    other = replace(PLANNED, stages=(PLAN[0], MixtureStage(300, (2, 1), 16), MixtureStage(800, (0, 1), 16)))
    before, between, behind = (continued_stream(PLANNED, other, cursor) for cursor in (200, 700, 1000))
    assert before.stream.stages == other.stages
    assert between.stream.stages == (*PLAN[:2], MixtureStage(700, (2, 1), 16), MixtureStage(800, (0, 1), 16))
    mixed = "from sample 700 on, the mixture is web 66.67 %, code 33.33 %, in samples of 16 tokens"
    assert between.notes[0] == mixed
    assert behind.stream.stages == PLAN


def test_planned_stage_of_the_same_mixture_begins_its_own_blocks() -> None:
    """Otherwise a run that stops there would read other samples than one that does not."""
    plan = replace(PLANNED, stages=(PLAN[0], MixtureStage(600, (3, 1), 16)))
    assert continued_stream(plan, plan, cursor=600).stream == plan


def test_going_back_keeps_a_mixture_that_replaced_the_plan() -> None:
    """The plan changed at sample 400; the checkpoint of the rollback still has the first plan."""
    changed = continued_stream(PLANNED, stream((WEB, 1), (CODE, 1)), cursor=400).stream
    assert with_later_stages(PLANNED, changed, cursor=300).stages == (PLAN[0], MixtureStage(400, (1, 1), 16))
    assert with_later_stages(PLANNED, changed, cursor=700) == PLANNED


def test_only_the_next_stages_are_logged() -> None:
    many = replace(PLANNED, stages=tuple(MixtureStage(100 * number, (1, 1 + number % 2), 16) for number in range(9)))
    notes = continued_stream(many, many, cursor=50).notes
    assert (len(notes), notes[-1]) == (4, "5 further stages of the mixture follow")


def test_samples_of_a_source_that_is_gone_are_refused() -> None:
    cases: list[tuple[SampleRanges, int, int, int]] = [
        (((700, 900),), 500, 500, 900),
        (((500, 600), (700, 900)), 500, 600, 900),
        (((500, 600), (610, 900)), 550, 600, 900),
    ]
    for skipped, cursor, first, end in cases:
        skips = replace(BEFORE, skipped=skipped)
        assert continued_stream(skips, stream((WEB, 1)), cursor).problem == (
            f"its samples from {first} on come from code, too, until sample {end}, and no source of the configuration "
            "has these tokens; name it again with weight=0"
        )
        found = continued_stream(skips, stream((WEB, 1), (CODE, 0)), cursor)
        assert found.stream.stages == (MixtureStage(0, (3, 1), 16), MixtureStage(end, (1, 0), 16))


def test_source_of_skipped_samples_only_may_be_gone() -> None:
    cases: list[tuple[tuple[MixtureStage, ...], SampleRanges, int]] = [
        ((), ((700, 900),), 700),
        ((), ((600, 900),), 700),
        ((MixtureStage(600, (1, 0), 16), MixtureStage(700, (1, 1), 16)), ((700, 900),), 650),
        (
            (MixtureStage(600, (1, 0), 16), MixtureStage(700, (0, 1), 16), MixtureStage(800, (1, 0), 16)),
            ((690, 900),),
            650,
        ),
    ]
    for stages, skipped, cursor in cases:
        skips = replace(BEFORE, stages=(*BEFORE.stages, *stages), skipped=skipped)
        found = continued_stream(skips, stream((WEB, 1)), cursor)
        assert found.problem == "", (stages, skipped)
        assert found.stream.stages[: len(stages) + 1] == skips.stages
        assert found.stream.stages[-1].weights == (1, 0)


def test_run_without_training_has_no_order_to_continue() -> None:
    assert continued_stream(SampleStream(7), stream((WEB, 1)), cursor=0).problem == "no training took place in it"
