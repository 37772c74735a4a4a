"""The pictures of a run in the plan of a data loader: the loader opens the same source as the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.data.drawn_pictures import DrawnPictures, drawn_source
from megatrain.data.training_source import TrainingSource


@dataclass(frozen=True, slots=True)
class PlannedPictures:
    """Drawn pictures. source: the number of their source in the mixture. size, patch_size: in pixels."""

    source: int
    size: int
    patch_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """The patches of a picture, and the bytes of a patch."""
        pictures = DrawnPictures(self.size, self.patch_size, 0)
        return pictures.num_patches, pictures.patch_width

    def open_source(self, identity: StreamSource, seed: int) -> TrainingSource:
        """Return the source. identity: as it was when the round began.

        Raises: DataError when the pictures are other ones.
        """
        source = drawn_source(identity.name, DrawnPictures(self.size, self.patch_size, seed))
        if source.identity != identity:
            raise DataError(
                f"{identity.name}: has digest {source.identity.digest}, and had {identity.digest} when this round "
                "began; the program was replaced during the run: start the job again"
            )
        return source

    @classmethod
    def read(cls, read: JsonObject) -> Self:
        """Return the pictures in a plan. Raises: CheckpointError naming the field."""
        read.check_names(cls)
        return cls(read.count("source"), read.count("size", least=1), read.count("patch_size", least=1))


def planned_pictures(sources: Sequence[TrainingSource | None]) -> PlannedPictures | None:
    """Return the pictures of the sources of a mixture; None if no source has any."""
    for number, source in enumerate(sources):
        if source is not None and isinstance(source.pictures, DrawnPictures):
            return PlannedPictures(number, source.pictures.size, source.pictures.patch_size)
    return None
