"""How much of each source a run reads until its end, and whether this exceeds the source's max_epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.data.mixture import Mixture
from megatrain.data.reader import BatchReader
from megatrain.data.training_source import TrainingSource


@dataclass(frozen=True, slots=True)
class SourceUse:
    """How much of one source the first samples of a run read. share: fraction of these samples; epochs: passes over the
    source.

    Samples that a rollback skips do not count, so a run that reads a source exactly `max_epochs` times can continue
    after a rollback.

    is_over: no sample from the cursor on is from this source.
    """

    source: TrainingSource
    num_samples: int
    share: float
    epochs: float
    is_over: bool

    @property
    def name(self) -> str:
        return self.source.identity.name


def source_uses(reader: BatchReader, end_sample: int, cursor: int = 0, skipped: SampleRanges = ()) -> list[SourceUse]:
    """Return the use of each source that the reader has opened, by the samples before number `end_sample`, for a run at
    `cursor`.

    skipped: samples that the run leaves out.
    """
    before, counts = (_counts(reader.mixture, number, skipped) for number in (cursor, end_sample))
    total = max(1, sum(counts))
    return [
        SourceUse(
            source=source,
            num_samples=count,
            share=count / total,
            epochs=source.order.epochs_after(count),
            is_over=count == past,
        )
        for source, past, count in zip(reader.sources, before, counts, strict=True)
        if source is not None
    ]


def _counts(mixture: Mixture, end_sample: int, skipped: SampleRanges) -> list[int]:
    """Return how many of the samples before number `end_sample` are read from each source."""
    counts = mixture.counts(end_sample)
    for first, end in skipped:
        if first < end_sample:
            counts = counts - (mixture.counts(min(end, end_sample)) - mixture.counts(first))
    found: list[int] = counts.tolist()
    return found


def check_epochs(uses: Sequence[SourceUse]) -> None:
    """Check that the run reads no source more often than its max_epochs. A source that is over is not checked.

    Raises: DataError naming the key, its value, the source's epochs, and a hint.
    """
    for use in uses:
        if 0.0 < use.source.max_epochs < use.epochs and not use.is_over:
            raise DataError(
                f"{use.source.section}.max_epochs={use.source.max_epochs:g}: until its end the run would read "
                f"{use.name} {use.epochs:.4g} times; lower its weight, use fewer train.steps or more text, or raise "
                "max_epochs"
            )


def uses_text(uses: Sequence[SourceUse]) -> str:
    """Return the uses of several sources as one line of a log."""
    return "; ".join(f"{use.name} {use.share:.2%} of the samples, {use.epochs:.3g} epochs" for use in uses)
