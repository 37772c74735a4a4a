"""The pictures of a run in the plan of a data loader: the loader opens the same source as the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.data.drawn_pictures import DrawnPictures, drawn_source
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.producer_file import read_producers
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.training_source import TrainingSource


@dataclass(frozen=True, slots=True)
class HostProducers:
    """The producers that the processes of a host ask. file: the path of the file that names them (producer_file.py)."""

    file: str
    number: int


@dataclass(frozen=True, slots=True)
class PlannedShards:
    """Pictures from shards. directory: of the index."""

    directory: str
    tokenizer: str
    decoder: str
    max_pixels: int
    producers: HostProducers


@dataclass(frozen=True, slots=True)
class PlannedPictures:
    """source: number of their source in the mixture. size, patch_size: in pixels. shards: None if they are drawn."""

    source: int
    size: int
    patch_size: int
    shards: PlannedShards | None = None

    @property
    def may_open(self) -> bool:
        """Whether the file that names producers exists, if the pictures need producers.

        The first rank of the host removes it when the round ends.
        """
        return self.shards is None or Path(self.shards.producers.file).exists()

    @property
    def shape(self) -> tuple[int, int]:
        """The patches of a picture, and the bytes of a patch."""
        picture_format = PictureFormat(self.size, self.patch_size)
        return picture_format.num_patches, picture_format.patch_values

    def open_source(self, identity: StreamSource, seed: int) -> TrainingSource:
        """Return the source. identity: as it was when the round began.

        Raises: DataError when the pictures cannot be opened or have changed; CheckpointError when the file of the
        producers is damaged.
        """
        source = self._opened(identity.name, seed)
        if source.identity != identity:
            raise DataError(
                f"{identity.name}: has digest {source.identity.digest}, and had {identity.digest} when this round "
                "began; the program or the index was replaced during the run: start the job again"
            )
        return source

    def _opened(self, name: str, seed: int) -> TrainingSource:
        shards = self.shards
        if shards is None:
            return drawn_source(name, DrawnPictures(PictureFormat(self.size, self.patch_size), seed))
        picture_format = PictureFormat(self.size, self.patch_size, shards.max_pixels)
        samples = ShardSamples(Path(shards.directory), picture_format, Path(shards.tokenizer), shards.decoder)
        samples.connect(read_producers(Path(shards.producers.file)))
        return samples.source(name, seed)

    @classmethod
    def read(cls, read: JsonObject) -> Self:
        """Return the pictures in a plan. Raises: CheckpointError naming the field."""
        read.check_names(cls)
        shards = None if read.is_null("shards") else _shards(read.section("shards"))
        return cls(read.count("source"), read.count("size", least=1), read.count("patch_size", least=1), shards)


def planned_pictures(
    sources: Sequence[TrainingSource | None], producers: HostProducers | None
) -> PlannedPictures | None:
    """Return the pictures of the sources of a mixture; None if no source has any. producers: for those from shards."""
    for number, source in enumerate(sources):
        pictures = None if source is None else source.pictures
        if isinstance(pictures, DrawnPictures):
            return PlannedPictures(number, pictures.format.size, pictures.format.patch)
        if isinstance(pictures, ShardSamples):
            assert producers is not None, "pictures from shards have producers"
            made = pictures.format
            shards = PlannedShards(
                str(pictures.index.directory.absolute()),
                str(pictures.tokenizer.absolute()),
                pictures.decoder,
                made.max_pixels,
                producers,
            )
            return PlannedPictures(number, made.size, made.patch, shards)
    return None


def _shards(read: JsonObject) -> PlannedShards:
    read.check_names(PlannedShards)
    producers = read.section("producers")
    producers.check_names(HostProducers)
    return PlannedShards(
        read.text("directory"),
        read.text("tokenizer"),
        read.text("decoder"),
        read.count("max_pixels", least=1),
        HostProducers(producers.text("file"), producers.count("number", least=1)),
    )
