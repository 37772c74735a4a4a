"""A decoder of Pillow under another name, and a record of ends, for producers that are threads of a test."""

from __future__ import annotations

import os

from megatrain.data.pictures import pillow_decoder
from megatrain.data.pictures.decoding_record import DecodingRecord

NO_ENDS = DecodingRecord(os.memfd_create("note"), os.memfd_create("ends"))
"""No thread ends, so all of them may have the same."""


class PillowDecoder(pillow_decoder.PillowDecoder):
    """See PictureDecoder."""

    def __init__(self, identity: str = "Pillow") -> None:
        super().__init__()
        self._identity = identity
