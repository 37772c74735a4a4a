"""A decoder of Pillow under another name, a record of ends, and producers that are threads of a test."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatrain.data.pictures import pillow_decoder
from megatrain.data.pictures.decoder import PictureDecoder
from megatrain.data.pictures.decoding_record import DecodingRecord
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.picture_source import Producers
from megatrain.data.pictures.producer import Producer
from megatrain.data.pictures.protocol import PRODUCER_LIMITS
from megatrain.peers.link import SECRET_BYTES, PeerAddress
from megatrain.peers.server import PeerServer, listen

SECRET = bytes(range(SECRET_BYTES))
NO_ENDS = DecodingRecord(os.memfd_create("note"), os.memfd_create("ends"))
"""No thread ends, so all of them may have the same."""


class PillowDecoder(pillow_decoder.PillowDecoder):
    """See PictureDecoder."""

    def __init__(self, identity: str = "Pillow") -> None:
        super().__init__()
        self._identity = identity


@contextmanager
def producers_in_threads(indexes: Sequence[PictureIndex], *decoders: PictureDecoder) -> Iterator[Producers]:
    """Yield producers of some indexes that are threads of this process, one for each decoder."""
    addresses = []
    with ExitStack() as stack:
        for decoder in decoders:
            producer = Producer(indexes, decoder, NO_ENDS)
            threading.Thread(target=producer.run, daemon=True).start()
            listener = listen("127.0.0.1")
            addresses.append(PeerAddress(*listener.getsockname()[:2]))
            stack.enter_context(PeerServer(listener, SECRET, producer.serve, PRODUCER_LIMITS, has_low_priority=False))
        yield Producers(addresses, SECRET)
