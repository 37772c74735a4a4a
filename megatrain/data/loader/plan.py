"""The plan of a host's data loader in a round: what it reads, for which ranks. JSON in the arena.

A *share* is one replica's part of each step. The ranks of a host that compute the same samples have one share. The
*readers* of a share are the indices of these ranks among the ranks of the host, in ascending order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Self

from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.data import DataConfig
from megatrain.config.model_products import DocumentCost
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.layout import STAGES, Layout
from megatrain.contracts.step_plan import Dealing
from megatrain.data.block_cache import CacheSettings
from megatrain.data.costs import DocumentCosts
from megatrain.data.indexed import IndexedDataset
from megatrain.data.loader.planned_pictures import HostProducers, PlannedPictures, planned_pictures
from megatrain.data.mixture import Mixture
from megatrain.data.order import PackedOrder, order_of
from megatrain.data.parts import PartSizes
from megatrain.data.reader import BatchReader
from megatrain.data.remote_path import path_or_url
from megatrain.data.training_source import TrainingSource

PLAN_SCHEMA_VERSION = 2
_DAMAGE = "the arena is damaged; remove its directory, and the job restarts from storage"


@dataclass(frozen=True, slots=True)
class Share:
    """What some ranks of a host read of each step: the part of `replica`.

    has_tokens: whether one of the readers is on the first or last stage of the pipeline. Stages between these need only
    the bounds of documents. encoders: the readers on the first stage, which encodes pictures.
    """

    replica: int
    readers: tuple[int, ...]
    has_tokens: bool
    encoders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """What the loader of a host reads. `depth`: how many steps of a share the ring holds, with the one that ranks
    compute.

    prefixes: the token files of each source of `stream`, absolute paths or URLs; "" for a source that gets no samples,
    and for that of the pictures. versions: of these files, as the ranks have opened and checked them. pictures: None if
    samples have none. vocab_size: 0 if there are no token files.
    cost_digests: the digest of the costs of each source, "" where samples are not dealt by costs.
    """

    steps: StepSequence
    shares: tuple[Share, ...]
    depth: int
    prefixes: tuple[str, ...]
    versions: tuple[str, ...]
    pictures: PlannedPictures | None
    stream: SampleStream
    vocab_size: int
    order_seed: int
    is_packed: bool
    has_document_mask: bool
    replaces_bad_samples: bool
    balanced_cost: DocumentCost | None
    cost_digests: tuple[str, ...]
    cache: CacheSettings
    readahead_blocks: int

    @property
    def num_readers(self) -> int:
        return sum(len(share.readers) for share in self.shares)

    @property
    def seq_len(self) -> int:
        """The tokens of the longest samples of the run."""
        return max(stage.seq_len for stage in self.stream.stages)

    @property
    def picture_shape(self) -> tuple[int, int]:
        """The patches of a picture and the bytes of a patch; zeros if no rank of this host encodes pictures."""
        if self.pictures is None or not any(share.encoders for share in self.shares):
            return 0, 0
        return self.pictures.shape

    @property
    def num_producers(self) -> int:
        """How many producers of pictures the loader asks."""
        shards = None if self.pictures is None else self.pictures.shards
        return 0 if shards is None else shards.producers.number

    def share_of(self, reader: int) -> int:
        """Return the number of the share of a rank of this host."""
        return next(number for number, share in enumerate(self.shares) if reader in share.readers)

    def open_reader(self) -> BatchReader:
        """Open the token files and the pictures.

        Raises: DataError when they cannot be used, or are not those with which the round began; CheckpointError when
        the file of the producers is damaged.
        """
        mixture = Mixture.of(self.stream)
        first_lens = [mixture.lengths_of(number)[0].seq_len for number in range(len(self.prefixes))]
        found = [
            self._open_source(number, prefix, first_lens[number]) if prefix else None
            for number, prefix in enumerate(self.prefixes)
        ]
        if self.pictures is not None:
            number = self.pictures.source
            found[number] = self.pictures.open_source(self.stream.sources[number], self.order_seed)
        return BatchReader.of(found, mixture, self.has_document_mask, self.replaces_bad_samples, self.balanced_cost)

    def _open_source(self, number: int, prefix: str, seq_len: int) -> TrainingSource:
        version = self.versions[number]
        dataset = IndexedDataset(path_or_url(prefix, self.cache), self.vocab_size, version)
        if dataset.version != version:
            raise DataError(
                f"{prefix}: the files have version {dataset.version}, and had {version} when this round began; they "
                "were replaced during the run: start the job again"
            )
        sizes = PartSizes(self.stream.block_tokens, self.stream.part_tokens)
        order = order_of(dataset, seq_len, self.order_seed, is_packed=self.is_packed, sizes=sizes)
        costs = DocumentCosts(dataset) if self.cost_digests[number] else None
        if costs is not None and costs.digest != self.cost_digests[number]:
            raise DataError(
                f"{costs.path}: has digest {costs.digest}, and had {self.cost_digests[number]} when this round began; "
                "it was replaced during the run: start the job again"
            )
        return TrainingSource(self.stream.sources[number], dataset, order, costs=costs)

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        more = {"balanced_cost": _numbers_of(self.balanced_cost), "schema_version": PLAN_SCHEMA_VERSION}
        return json.dumps(asdict(self) | more, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, content: bytes, location: str) -> Self:
        """Return the plan in a file. Raises: CheckpointError naming the file, `location`, and the field."""
        read = JsonObject.parse(content, location, PLAN_SCHEMA_VERSION, _DAMAGE)
        read.check_names(cls, "schema_version")
        return cls(
            steps=_steps(read.section("steps")),
            shares=tuple(_share(share) for share in read.sections("shares")),
            depth=read.count("depth", least=1),
            prefixes=read.texts("prefixes"),
            pictures=None if read.is_null("pictures") else PlannedPictures.read(read.section("pictures")),
            versions=read.texts("versions"),
            stream=SampleStream.read(read.section("stream")),
            vocab_size=read.count("vocab_size"),
            order_seed=read.count("order_seed"),
            is_packed=read.flag("is_packed"),
            has_document_mask=read.flag("has_document_mask"),
            replaces_bad_samples=read.flag("replaces_bad_samples"),
            balanced_cost=_cost(read),
            cost_digests=read.texts("cost_digests"),
            cache=_cache(read.section("cache")),
            readahead_blocks=read.count("readahead_blocks"),
        )


def loader_plan(
    reader: BatchReader,
    stream: SampleStream,
    steps: StepSequence,
    layout: Layout,
    ranks: Sequence[int],
    config: DataConfig,
    producers: HostProducers | None = None,
) -> LoaderPlan:
    """Return the plan of the host with these ranks. reader: the reader of the samples of `stream`.

    producers: of pictures from shards.
    """
    opened = next(source for source in reader.sources if source is not None)
    datasets = [None if source is None else source.dataset for source in reader.sources]
    files = [one if isinstance(one, IndexedDataset) else None for one in datasets]
    return LoaderPlan(
        steps=steps,
        shares=shares_of(layout, ranks),
        depth=config.prefetch + 1,
        prefixes=tuple("" if one is None else str(one.prefix.absolute()) for one in files),
        pictures=planned_pictures(reader.sources, producers),
        versions=tuple("" if one is None else one.version for one in files),
        stream=stream,
        vocab_size=max((one.vocab_size or 0 for one in files if one is not None), default=0),
        order_seed=opened.order.seed,
        is_packed=isinstance(opened.order, PackedOrder),
        has_document_mask=reader.has_document_mask,
        replaces_bad_samples=reader.replaces_bad_samples,
        balanced_cost=reader.balanced_cost,
        cost_digests=reader.cost_digests,
        cache=CacheSettings.of(config),
        readahead_blocks=config.readahead_blocks,
    )


def shares_of(layout: Layout, ranks: Sequence[int]) -> tuple[Share, ...]:
    """Return the shares of the host with these ranks, each replica once, in ascending order."""
    stages_of: dict[int, dict[int, int]] = {}
    for reader, rank in enumerate(sorted(ranks)):
        stages_of.setdefault(layout.sample_share(rank)[0], {})[reader] = layout.index(STAGES, rank)
    shares = []
    for replica, stages in sorted(stages_of.items()):
        has_tokens = not {0, layout.size(STAGES) - 1}.isdisjoint(stages.values())
        encoders = tuple(reader for reader, stage in stages.items() if stage == 0)
        shares.append(Share(replica, tuple(stages), has_tokens, encoders))
    return tuple(shares)


def _steps(read: JsonObject) -> StepSequence:
    read.check_names(StepSequence)
    batches, dealing = read.section("batches"), read.section("dealing")
    batches.check_names(BatchSchedule)
    dealing.check_names(Dealing)
    batch = batches.section("batch")
    batch.check_names(BatchConfig)
    return StepSequence(
        BatchSchedule(
            BatchConfig(**{field.name: batch.count(field.name) for field in fields(BatchConfig)}),
            tuple(_stage(stage) for stage in batches.sections("stages")),
        ),
        Dealing(
            dealing.count("num_microbatches"),
            dealing.count("num_replicas", least=1),
            dealing.count("least_slots"),
            dealing.flag("has_equal_slots"),
        ),
        read.count("cursor"),
        read.count("num_steps"),
        read.sample_ranges("skipped"),
    )


def _stage(read: JsonObject) -> BatchStage:
    read.check_names(BatchStage)
    return BatchStage(read.count("first_sample"), read.count("global_batch_size", least=1))


def _numbers_of(cost: DocumentCost | None) -> list[int] | None:
    """Return the numbers of a cost for JSON: of a token and of a picture, then size and layers of each window."""
    return None if cost is None else [cost.per_token, cost.per_picture, *chain.from_iterable(cost.windows)]


def _cost(read: JsonObject) -> DocumentCost | None:
    if read.is_null("balanced_cost"):
        return None
    per_token, per_picture, *windows = read.counts("balanced_cost")
    return DocumentCost(per_token, tuple(zip(windows[::2], windows[1::2], strict=True)), per_picture)


def _cache(read: JsonObject) -> CacheSettings:
    read.check_names(CacheSettings)
    return CacheSettings(read.text("directory"), read.count("max_bytes"), read.count("block_bytes", least=1))


def _share(read: JsonObject) -> Share:
    read.check_names(Share)
    return Share(read.count("replica"), read.counts("readers"), read.flag("has_tokens"), read.counts("encoders"))
