"""The sample order of a job, as manifests and plans record it: sources, stages of their mixture, skipped samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.sample_ranges import SampleRanges


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A data set that provides samples. `digest`: the digest of its tokens; empty when unknown.

    num_tokens: of shards of pictures, the number of the pictures.
    """

    name: str
    num_tokens: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class MixtureStage:
    """The weights of the sources and the length of samples from sample `first_sample` on.

    The weights are in the order of the stream's sources. Sources that were added after this stage have no weight in it.
    A source with weight 0 provides no samples. seq_len: the tokens of a sample.
    """

    first_sample: int
    weights: tuple[int, ...]
    seq_len: int


@dataclass(frozen=True, slots=True)
class SampleStream:
    """What determines the sample order. The data cursor is a position in this order.

    Without sources, no training took place. `skipped`: samples that the job leaves out since a rollback. The digests
    are of the held-out data and of the tokenizer's file; empty if there is no such file, or the digest is unknown. The
    digests of several validation sets are separated by commas, in the order of the configuration.
    """

    seed: int
    sources: tuple[StreamSource, ...] = ()
    stages: tuple[MixtureStage, ...] = ()
    skipped: SampleRanges = ()
    validation_digest: str = ""
    tokenizer_digest: str = ""
    packing: str = ""
    """How documents are packed into samples (data/packing.py); empty: not packed."""
    block_tokens: int = 0
    pictures: str = ""
    """What makes patches and tokens of pictures from shards (data/pictures/shard_samples.py); empty: there are none."""
    part_tokens: int = 0
    """The tokens of each part of an epoch (data/parts.py); 0: the epoch is one part."""

    def to_dict(self) -> dict[str, Any]:
        """Return the stream as values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the stream that `to_dict` described, also after a round trip through JSON."""
        return cls(
            **{
                **values,
                "sources": tuple(StreamSource(**source) for source in values["sources"]),
                "stages": tuple(
                    MixtureStage(stage["first_sample"], tuple(stage["weights"]), stage["seq_len"])
                    for stage in values["stages"]
                ),
                "skipped": tuple((first, end) for first, end in values["skipped"]),
            }
        )

    @classmethod
    def read(cls, reader: JsonObject) -> Self:
        """Return the stream in a JSON object. Raises: CheckpointError naming the field."""
        reader.check_names(cls)
        sources = tuple(_source(source) for source in reader.sections("sources"))
        stages = tuple(_stage(stage, len(sources)) for stage in reader.sections("stages"))
        firsts = [stage.first_sample for stage in stages]
        if bool(sources) != bool(stages) or firsts[:1] not in ([], [0]):
            raise reader.error(
                "stages", "expected a first stage at sample 0 if there are sources, and no stages if there are none"
            )
        if any(second <= first for first, second in pairwise(firsts)):
            raise reader.error("stages", "expected stages in ascending order of first_sample")
        return cls(**reader.scalars(cls), sources=sources, stages=stages, skipped=reader.sample_ranges("skipped"))


def _source(reader: JsonObject) -> StreamSource:
    reader.check_names(StreamSource)
    return StreamSource(**reader.scalars(StreamSource))


def _stage(reader: JsonObject, num_sources: int) -> MixtureStage:
    reader.check_names(MixtureStage)
    weights = reader.counts("weights")
    if not 0 < len(weights) <= num_sources or not any(weights):
        raise reader.error("weights", f"expected 1 to {num_sources} weights, at least one of them above 0")
    return MixtureStage(reader.count("first_sample"), weights, reader.count("seq_len", least=1))
