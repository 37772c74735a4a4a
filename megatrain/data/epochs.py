"""What a run reads of each source until its end, and whether that is more often than the source allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.data.reader import BatchReader


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What the first samples of a run read of one source. share: of these samples; epochs: how often it is read."""

    name: str
    num_tokens: int
    num_samples: int
    share: float
    epochs: float
    max_epochs: float


def source_uses(reader: BatchReader, end_sample: int) -> list[SourceUse]:
    """Return what the samples before number `end_sample` read of each source that is open."""
    counts = reader.mixture.counts(end_sample).tolist()
    return [
        SourceUse(
            name=source.name,
            num_tokens=source.dataset.num_tokens,
            num_samples=count,
            share=count / max(1, end_sample),
            epochs=count / source.order.samples_per_epoch,
            max_epochs=source.max_epochs,
        )
        for source, count in zip(reader.sources, counts, strict=True)
        if source is not None
    ]


def check_epochs(uses: Sequence[SourceUse]) -> None:
    """Check that no source is read more often than its max_epochs.

    Raises: DataError naming the source, its epochs, and the way out.
    """
    for use in uses:
        if 0.0 < use.max_epochs < use.epochs:
            raise DataError(
                f"{use.name}: the run would read it {use.epochs:.4g} times, and its data_source.max_epochs is "
                f"{use.max_epochs:g}; lower its weight, use fewer train.steps, or more text"
            )


def uses_text(uses: Sequence[SourceUse]) -> str:
    """Return the uses of several sources as one line of a log."""
    return "; ".join(f"{use.name} {use.share:.2%} of the samples, {use.epochs:.3g} epochs" for use in uses)
