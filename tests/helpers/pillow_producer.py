"""A decoder of Pillow under another name, for producers that are threads of a test."""

from __future__ import annotations

from megatrain.data.pictures import pillow_decoder


class PillowDecoder(pillow_decoder.PillowDecoder):
    """See PictureDecoder."""

    def __init__(self, identity: str = "Pillow") -> None:
        super().__init__()
        self._identity = identity
