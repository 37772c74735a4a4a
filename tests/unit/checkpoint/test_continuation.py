"""A continued run: which changes of the configuration it accepts, also with sequences of other lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.checkpoint.continuation import Continuation, TrainingProgress, continuation, origin_of
from megatrain.checkpoint.continued_lengths import lengths_problem, with_aligned_lengths
from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.sample_ranges import SampleRanges
from tests.helpers.checkpoint_tree import make_manifest
from tests.helpers.one_source import stream_of_one

BASE: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 4, "num_heads": 8},
    "batch": {"global_batch_size": 8},
    "train": {"steps": 200},
    "optimizer": {"lr": 1e-3},
}
DATA = stream_of_one(num_tokens=5000, seed=7, digest="d" * 32)
OLD, NEW = "0" * 32, "1" * 32
DIFFER = "losses of evaluations before and after differ"
PROGRESS = TrainingProgress(120, 3840, 983_040, 118, 2)


def go_on(*, is_same_run: bool, data: SampleStream = DATA, **changes: dict[str, Any]) -> Continuation:
    manifest = make_manifest(config=Config.from_dict(BASE).to_dict(), data=DATA)
    config = Config.from_dict({name: {**BASE.get(name, {}), **changes.get(name, {})} for name in {**BASE, **changes}})
    return continuation(origin_of(manifest, "the-checkpoint"), config, data, is_same_run=is_same_run)


@pytest.mark.parametrize("is_same_run", [True, False])
def test_unchanged_configuration_resumes_at_its_step(is_same_run: bool) -> None:
    assert go_on(is_same_run=is_same_run) == Continuation(PROGRESS, DATA, ())


def test_change_of_training_keys_is_noted() -> None:
    found = go_on(is_same_run=True, optimizer={"lr": 2e-3}, model={"dropout": 0.1}, train={"steps": 300})
    assert found.progress == PROGRESS
    changes = ("model.dropout: 0.0 -> 0.1", "train.steps: 200 -> 300", "optimizer.lr: 0.001 -> 0.002")
    assert found.notes == tuple(f"changed since: {change}" for change in changes)


def test_weights_of_another_model_are_refused() -> None:
    changes = {"num_layers": 2, "has_bias": False, "has_tied_head": False, "positions": "rope", "seq_len": 32}
    for name, value in changes.items():
        for is_same_run, hint in (
            (True, "begin another run"),
            (False, r"use the .model. section of its r\d{6}-manifest-[0-9a-f]{8}\.json$"),
        ):
            with pytest.raises(
                CheckpointError, match=rf"^the-checkpoint holds a different model: model\.{name}: .*; .*{hint}"
            ):
                go_on(is_same_run=is_same_run, model={name: value})


def test_another_run_may_compute_something_else_with_the_weights() -> None:
    with pytest.raises(CheckpointError, match=r"model\.window_size: 0 -> 8; restore these values"):
        go_on(is_same_run=True, model={"window_size": 8})
    found = go_on(is_same_run=False, model={"window_size": 8})
    assert found == Continuation(PROGRESS, DATA, ("changed since: model.window_size: 0 -> 8",))


def of_content(digest: str, num_tokens: int = 5000) -> SampleStream:
    return stream_of_one(num_tokens, 7, digest=digest)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(of_content(NEW, 4999), "4999 tokens"), (replace(DATA, seed=8), "drawn with seed 7, and data.seed is 8")],
)
def test_cursor_of_another_sample_order_is_refused(data: SampleStream, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^the-checkpoint: its sample order differs: .*{problem}"):
        go_on(is_same_run=True, data=data)
    found = go_on(is_same_run=False, data=data)
    assert found.progress == TrainingProgress(num_updates=118)
    assert "begins at step 0 with these weights and moments" in found.notes[-1]


def with_digests(before: SampleStream, now: SampleStream, **changes: Any) -> Continuation:
    config = Config.from_dict({**BASE, "data": changes})
    return with_sets(before, now, config, config)


def with_sets(before: SampleStream, now: SampleStream, config_before: Config, config: Config) -> Continuation:
    manifest = make_manifest(config=config_before.to_dict(), data=before)
    return continuation(origin_of(manifest, "the-checkpoint"), config, now, is_same_run=True)


def test_changed_data_is_refused_unless_its_digest_is_accepted() -> None:
    before, now = of_content(OLD), of_content(NEW)
    with pytest.raises(CheckpointError, match=f"digest {OLD}.*at the same cursor: data.accepted_digest={NEW}; restore"):
        with_digests(before, now)
    with pytest.raises(CheckpointError, match=f"digest {OLD}"):
        with_digests(before, now, accepted_digest=OLD)
    found = with_digests(before, now, accepted_digest=f"{OLD},{NEW}")
    assert (found.progress, found.stream) == (PROGRESS, now)
    assert f"has other content (digest {NEW}), which data.accepted_digest accepts" in found.notes[0]
    assert with_digests(now, now, accepted_digest=NEW) == Continuation(PROGRESS, now, ())


def test_another_run_with_another_order_begins_at_step_0() -> None:
    books = StreamSource("books", 2000, "b" * 32)
    mixed = replace(DATA, sources=(*DATA.sources, books), stages=(MixtureStage(0, (1, 1), 16),))
    for now in (of_content(NEW), mixed):
        manifest = make_manifest(config=Config.from_dict(BASE).to_dict(), data=of_content("d" * 32))
        found = continuation(origin_of(manifest, "x"), Config.from_dict(BASE), now, is_same_run=False)
        assert (found.progress, found.stream) == (TrainingProgress(num_updates=118), now)


def test_another_run_continues_an_equal_plan_with_more_sources() -> None:
    books = StreamSource("books", 2000, "b" * 32)
    stages = (MixtureStage(0, (1,), 16), MixtureStage(10**9, (2,), 16))
    manifest = make_manifest(config=Config.from_dict(BASE).to_dict(), data=replace(DATA, stages=stages))
    padded = tuple(MixtureStage(stage.first_sample, (1, 0), 16) for stage in stages)
    now = replace(DATA, sources=(*DATA.sources, books), stages=padded)
    found = continuation(origin_of(manifest, "x"), Config.from_dict(BASE), now, is_same_run=False)
    assert found.progress == PROGRESS


def test_another_mixture_of_the_same_run_is_noted() -> None:
    books = StreamSource("books", 2000, "b" * 32)
    found = go_on(
        is_same_run=True, data=replace(DATA, sources=(books, *DATA.sources), stages=(MixtureStage(0, (1, 3), 16),))
    )
    assert found.progress == PROGRESS
    assert found.stream.stages == (MixtureStage(0, (1,), 16), MixtureStage(PROGRESS.consumed_samples, (3, 1), 16))
    assert found.notes[-1].startswith(f"from sample {PROGRESS.consumed_samples} on, the mixture is")


def test_changed_files_that_do_not_affect_the_order_are_noted() -> None:
    before = replace(DATA, validation_digest=OLD, tokenizer_digest=OLD)
    now = replace(before, validation_digest=NEW, tokenizer_digest=NEW)
    assert with_digests(before, now, validation="held-out").notes == (
        f"changed since: the content of data.validation (digest {OLD} -> {NEW}); {DIFFER}",
        f"changed since: the content of data.tokenizer (digest {OLD} -> {NEW})",
    )
    assert with_digests(before, replace(before, validation_digest="", tokenizer_digest="")).notes == ()
    (note,) = with_digests(of_content(""), before).notes
    assert "the checkpoint has no digest of" in note


def test_changed_validation_sets_are_noted_by_name() -> None:
    def of_sets(*names: str) -> Config:
        sections = {f"validation_set-{number}": {"path": name} for number, name in enumerate(names, start=2)}
        return Config.from_dict({**BASE, **sections})

    cases: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
        (("web", "code"), f"{OLD},{OLD}", ()),
        (("web", "code"), f"{NEW},{OLD}", ("web",)),
        (("web", "code"), f"{NEW},{NEW}", ("web", "code")),
        (("code", "books"), f"{NEW},{NEW}", ("code",)),
        (("books",), NEW, ()),
        ((), "", ()),
    ]
    for sets, digests, changed in cases:
        before, now = (replace(DATA, validation_digest=text) for text in (f"{OLD},{OLD}", digests))
        found = with_sets(before, now, of_sets("web", "code"), of_sets(*sets))
        assert [note for note in found.notes if "content" in note] == [
            f"changed since: the content of {name} (digest {OLD} -> {NEW}); {DIFFER}" for name in changed
        ], (sets, digests)


def test_configuration_that_is_not_valid_is_reported() -> None:
    manifest = make_manifest(config={"model": {"color": "blue"}})
    with pytest.raises(
        CheckpointError, match=r"^the-checkpoint: its configuration is not valid in .*: 1\. model\.color"
    ):
        continuation(origin_of(manifest, "the-checkpoint"), Config.from_dict(BASE), DATA, is_same_run=True)


def test_imported_weights_begin_at_step_0() -> None:
    manifest = make_manifest(config=Config.from_dict(BASE).to_dict(), data=SampleStream(seed=0))
    config = Config.from_dict({**BASE, "optimizer": {"lr": 5.0}, "model": BASE["model"] | {"window_size": 8}})
    found = continuation(origin_of(manifest, "imported"), config, DATA, is_same_run=False)
    assert found.progress == TrainingProgress()
    assert found.notes == (
        "changed since: model.window_size: 0 -> 8",
        "the weights were trained elsewhere, so this run begins at step 0",
    )


def test_a_run_may_raise_the_limit_of_the_sample_length() -> None:
    before = Config.from_dict({**BASE, "model": {**BASE["model"], "positions": "rope"}})
    longer = replace(before, model=replace(before.model, seq_len=32))
    now = replace(longer, data=replace(before.data, seq_len=16))
    recorded, other = (replace(DATA, stages=(MixtureStage(0, (1,), seq_len),)) for seq_len in (16, 32))
    assert with_sets(recorded, recorded, before, now).notes == (
        "changed since: model.seq_len: 16 -> 32",
        "changed since: data.seq_len: 0 -> 16",
    )
    with pytest.raises(CheckpointError, match=r"its first samples had 16 tokens, .* have 32; set data\.seq_len=16"):
        with_sets(recorded, other, before, longer)


BATCHES = BatchSchedule(BatchConfig(global_batch_size=8), (BatchStage(80, 16),))


def stream(*lengths: tuple[int, int], skipped: SampleRanges = ()) -> SampleStream:
    """Return the stream of one source with these first samples and lengths."""
    stages = tuple(MixtureStage(first, (1,), seq_len) for first, seq_len in lengths)
    return SampleStream(7, (StreamSource("web", 5000, "a" * 32),), stages, skipped)


RECORDED = PLANNED = stream((0, 4), (40, 16))
# (planned, cursor) and a part of the problem, "" for none
PROBLEMS = {
    "as planned": (stream((0, 4), (40, 16)), 48, ""),
    "moved by less than a step": (stream((0, 4), (33, 16)), 48, ""),
    "a later change is added": (stream((0, 4), (40, 16), (48, 4)), 48, ""),
    "a change ahead is removed": (stream((0, 4)), 40, ""),
    "it comes now": (stream((0, 4), (35, 16)), 40, ""),
    "another beginning": (
        stream((0, 8), (40, 16)),
        48,
        "had 4 tokens, and those of the configuration have 8; set data.seq_len=4",
    ),
    "removed": (stream((0, 4)), 48, "by the stages of the configuration: 4 from sample 0 on; restore"),
    "another length": (stream((0, 4), (40, 8)), 48, "have had these tokens: 4 from sample 0 on, 16 from sample 40 on"),
    "too early": (stream((0, 4), (8, 16)), 48, "let others begin after the 288 tokens that the run has read"),
    "later than it was": (stream((0, 4), (41, 16)), 48, "4 from sample 0 on, 16 from sample 41 on"),
    "one more in the past": (stream((0, 4), (20, 8), (40, 16)), 48, "8 from sample 20 on, 16 from sample 40 on"),
}


def test_lengths_of_the_past_must_stay() -> None:
    for case, (planned, cursor, expected) in PROBLEMS.items():
        found = lengths_problem(RECORDED, planned, cursor, 288, BATCHES)
        assert expected in found, (case, found)
        assert bool(found) == bool(expected), (case, found)


def test_samples_left_out_do_not_make_a_change_late() -> None:
    # The step from sample 37 on has the samples 58 to 60, too.
    before = stream((0, 4), (61, 16), skipped=((42, 58),))
    assert before == with_aligned_lengths(replace(before, stages=PLANNED.stages), BATCHES, 37)
    assert not lengths_problem(before, PLANNED, 69, 288, BATCHES)


def test_a_change_before_skipped_samples_must_stay() -> None:
    """Its stage stays in the stream, so the next start would find the difference."""
    before = stream((0, 4), (40, 16), skipped=((56, 64),))
    assert not lengths_problem(before, PLANNED, 24, 96, BATCHES)
    assert "restore seq_len and after_tokens" in lengths_problem(before, stream((0, 4), (200, 16)), 24, 96, BATCHES)


# (lengths, cursor, skipped) and the resulting lengths
ALIGNED: list[tuple[tuple[tuple[int, int], ...], int, SampleRanges, tuple[tuple[int, int], ...]]] = [
    (((0, 4), (40, 16)), 0, (), ((0, 4), (40, 16))),
    (((0, 4), (41, 16)), 0, (), ((0, 4), (48, 16))),
    # 3 samples are skipped, so the steps from 8 on begin at 19, 27, 35, 43.
    (((0, 4), (40, 16)), 8, ((10, 13),), ((0, 4), (43, 16))),
    # A stage that the change passes begins with it.
    (((0, 4), (40, 16), (41, 16)), 8, ((10, 13),), ((0, 4), (43, 16))),
    # Earlier lengths stay.
    (((0, 4), (40, 16)), 43, ((10, 13),), ((0, 4), (40, 16))),
    # No step has samples on both sides of the change.
    (((0, 4), (40, 16)), 8, ((16, 48),), ((0, 4), (40, 16))),
    # The second change replaces the first.
    (((0, 4), (41, 16), (45, 8)), 0, (), ((0, 4), (48, 8))),
    (((0, 4), (81, 16)), 0, (), ((0, 4), (96, 16))),
]


def test_changes_of_the_length_begin_with_steps() -> None:
    for lengths, cursor, skipped, expected in ALIGNED:
        found = with_aligned_lengths(stream(*lengths, skipped=skipped), BATCHES, cursor)
        assert found == stream(*expected, skipped=skipped), (lengths, cursor, skipped)


def test_a_length_is_part_of_the_stage_that_continues() -> None:
    now = stream((0, 4), (35, 16))
    found = continued_stream(stream((0, 4)), now, cursor=40)
    assert found.stream == stream((0, 4), (40, 16))
    assert found.notes == ("from sample 40 on, the mixture is web 100 %, in samples of 16 tokens",)
    ahead = continued_stream(stream((0, 4)), stream((0, 4), (48, 16)), cursor=40)
    assert ahead.stream == stream((0, 4), (48, 16))


def test_a_run_cannot_continue_with_other_parts() -> None:
    before = SampleStream(7, (StreamSource("web", 5000),), (MixtureStage(0, (1,), 4),), block_tokens=8, part_tokens=64)
    found = continued_stream(before, stream((0, 4)), cursor=40)
    assert found.problem == "data.block_tokens and data.part_tokens were (8, 64), and are (0, 0)"
