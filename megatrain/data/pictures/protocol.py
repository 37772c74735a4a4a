"""What source and producer send each other, over an authenticated connection (peers/link.py).

The source opens a connection for each request: data, format and numbers of samples, one message of JSON. The producer
answers with a message that has the name of its decoder and how many requests wait at the producer, then with each
sample in the order of the request: a message with the SHA-256 of the content (preparation.py) and whether the picture
can be used; then the patches and the caption, or for a bad picture its address and the reason, and the tag that covers
them. The producer answers a request that it cannot serve with an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import CommunicationError, DataError
from megatrain.data.pictures.bad_picture import BadPicture
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.preparation import PreparedPicture, content_digest
from megatrain.data.pictures.shard_reader import MAX_CAPTION_BYTES
from megatrain.peers.link import PeerConnection, PeerLimits

REQUEST_PICTURES = 16
"""The most pictures of one request. A producer keeps the pictures of a request until they are sent."""
PRODUCER_LIMITS = PeerLimits(authentication_s=30.0, call_s=60.0, total_s=600.0)
"""A producer that is being started again accepts connections after a few seconds."""
_MAX_WAITING = 1_000_000
_MAX_PROBLEM = 600
"""Characters of an error. Each takes at most six of the 4,096 bytes of a message: as an escape, or else in UTF-8."""


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """data: the digest of the index. numbers: at most REQUEST_PICTURES."""

    data: str
    format: PictureFormat
    numbers: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> PictureRequest:
        """Raises: DataError when the message is not a request, or asks for no picture or too many."""
        try:
            values = json.loads(message)
            picture_format = PictureFormat(**{name: int(value) for name, value in values["format"].items()})
            numbers = tuple(int(number) for number in values["numbers"])
            if not 1 <= len(numbers) <= REQUEST_PICTURES:
                raise DataError(f"asks for {len(numbers)} pictures; from 1 to {REQUEST_PICTURES} are allowed")
            return cls(str(values["data"]), picture_format, numbers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"is not a request of this version of megatrain ({error!r})") from error


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """decoder: the identity of the decoder. num_waiting: the requests that waited when this one arrived."""

    decoder: str
    num_waiting: int


def send_answer(
    connection: PeerConnection, request: PictureRequest, head: AnswerHead, pictures: Iterator[PreparedPicture]
) -> None:
    """Send the pictures of a request, or the error that ends them.

    Raises: CommunicationError.
    """
    connection.send_message(json.dumps(asdict(head)).encode())
    try:
        for picture in pictures:
            _send_picture(connection, request, picture)
    except DataError as error:
        send_refusal(connection, str(error))


def send_refusal(connection: PeerConnection, problem: str) -> None:
    """Answer that a request cannot be served. Raises: CommunicationError."""
    text = json.dumps({"error": problem[:_MAX_PROBLEM]}, ensure_ascii=False)
    connection.send_message(text.encode(errors="backslashreplace"))


class AnswerReader:
    """Reads the answer to a request.

    Raises: CommunicationError when the connection fails or the answer is wrong; DataError when the producer refuses.
    """

    def __init__(self, connection: PeerConnection, request: PictureRequest) -> None:
        self._connection = connection
        self._request = request
        self.head = self._head()

    def read_into(self, patches_NPV: NDArray[np.uint8]) -> list[PreparedPicture]:
        """Read all pictures of the request; their patches are stored in the array, zeros for a bad picture.

        Shapes: [numbers of the request, patches, patch_values].
        """
        return [
            self._read_picture(number, patches_PV)
            for number, patches_PV in zip(self._request.numbers, patches_NPV, strict=True)
        ]

    def _head(self) -> AnswerHead:
        head = self._message("decoder")
        num_waiting = head.get("num_waiting")
        if not isinstance(num_waiting, int) or not 0 <= num_waiting <= _MAX_WAITING:
            raise self._error(f"announces {num_waiting!r} waiting requests; the limit is {_MAX_WAITING}")
        return AnswerHead(str(head["decoder"]), num_waiting)

    def _read_picture(self, number: int, patches_PV: NDArray[np.uint8]) -> PreparedPicture:
        head = self._message("digest")
        if head.get("number") != number:
            raise self._error(f"answered with sample {head.get('number')} in place of {number}")
        is_bad, text_bytes = head.get("is_bad"), head.get("text_bytes")
        if not isinstance(text_bytes, int) or not 0 <= text_bytes <= MAX_CAPTION_BYTES:
            raise self._error(f"announces {text_bytes!r} bytes of text; the limit is {MAX_CAPTION_BYTES}")
        if is_bad:
            patches_PV[...] = 0
        else:
            self._connection.receive_into(patches_PV.data.cast("B"))
        text = bytearray(text_bytes)
        self._connection.receive_into(memoryview(text))
        self._connection.check_tag()
        try:
            if is_bad:
                picture = PreparedPicture(number, None, bad=BadPicture(**json.loads(text)))
            else:
                picture = PreparedPicture(number, patches_PV, text.decode())
        except (ValueError, TypeError) as error:
            raise self._error(f"sent a text that cannot be read ({error!r})") from error
        if content_digest(self._request.data, self._request.format, picture) != head["digest"]:
            raise self._error(f"sent other content for sample {number} than its SHA-256 names")
        return picture

    def _message(self, key: str) -> dict[str, Any]:
        try:
            message = json.loads(self._connection.receive_message())
        except ValueError:
            message = None
        if isinstance(message, dict) and "error" in message:
            raise DataError(f"{self._connection.location}: {message['error']}")
        if not isinstance(message, dict) or key not in message:
            raise self._error(f"sent no {key}")
        return message

    def _error(self, problem: str) -> CommunicationError:
        return CommunicationError(f"{self._connection.location}: the producer {problem}")


def _send_picture(connection: PeerConnection, request: PictureRequest, picture: PreparedPicture) -> None:
    text = picture.caption.encode() if picture.bad is None else json.dumps(asdict(picture.bad)).encode()
    digest = content_digest(request.data, request.format, picture)
    head = {"number": picture.number, "digest": digest, "is_bad": picture.bad is not None, "text_bytes": len(text)}
    connection.send_message(json.dumps(head).encode())
    if picture.patches_PV is not None:
        connection.send(np.ascontiguousarray(picture.patches_PV).data.cast("B"))
    connection.send(text)
    connection.send_tag()
