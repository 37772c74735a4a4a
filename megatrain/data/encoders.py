"""Encoders convert text to token ids and back: the tokenizers library, SentencePiece, or the bytes of UTF-8 themselves.

An encoder has no end-of-document token; `Tokenizer` (tokenizer.py) adds one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_NAME
from megatrain.contracts.errors import DataError
from megatrain.data.end_of_document import END_OF_DOCUMENT

if TYPE_CHECKING:
    import sentencepiece  # type: ignore[import-untyped, import-not-found, unused-ignore]
    import tokenizers

NUM_BYTES = 256


class Encoder(Protocol):
    """Text to ids and back. `notes`: settings of its file that are switched off; `losses`: the text that is lost by
    settings that stay on; `file_name`: its usual file name; `runs_in_threads`: whether `encode` releases the
    interpreter lock."""

    notes: tuple[str, ...]
    losses: tuple[str, ...]
    file_name: str
    runs_in_threads: bool

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""

    def content(self) -> bytes:
        """Return the content of the tokenizer's file."""


class LibraryEncoder:
    """A tokenizer of the tokenizers library. Text that equals a special token gets ordinary ids.

    Encoding uses the library's threads. A fork after that is safe: the child then encodes in one thread.
    """

    file_name = TOKENIZER_NAME
    runs_in_threads = True

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.notes = tuple(_switched_off(backend))
        # the limit is kept, because the time of WordPiece is at least quadratic in the length of a word
        longest = getattr(backend.model, "max_input_chars_per_word", None)
        self.losses: tuple[str, ...] = ()
        if longest is not None:
            self.losses = (f"words of more than {longest} characters, because of its max_input_chars_per_word",)
        backend.encode_special_tokens = True
        self._backend = backend

    def vocabulary(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def content(self) -> bytes:
        return str(self._backend.to_str(pretty=True)).encode()


class SentencePieceEncoder:
    """A SentencePiece model. Text is never encoded to control symbols, such as </s>, which decode to nothing."""

    notes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    file_name = SENTENCEPIECE_NAME
    runs_in_threads = True

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, content: bytes) -> None:
        self._processor = processor
        self._content = content

    def vocabulary(self) -> Mapping[str, int]:
        return {self._processor.id_to_piece(number): number for number in range(self._processor.get_piece_size())}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(list(ids)))

    def content(self) -> bytes:
        return self._content


class ByteEncoder:
    """Ids 0 to 255 are the bytes of UTF-8; id 256 ends a document. `content` is a tokenizer.json with the same ids."""

    notes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    file_name = TOKENIZER_NAME
    runs_in_threads = False

    def vocabulary(self) -> Mapping[str, int]:
        return {**{symbol: byte for byte, symbol in enumerate(_byte_symbols())}, END_OF_DOCUMENT: NUM_BYTES}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        runs = itertools.groupby(ids, key=lambda token: token < NUM_BYTES)
        return "".join(
            bytes(run).decode(errors="replace") if is_text else END_OF_DOCUMENT * len(list(run))
            for is_text, run in runs
        )

    def content(self) -> bytes:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        backend = Backend(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([END_OF_DOCUMENT])
        return LibraryEncoder(backend).content()


def sentencepiece_encoder(content: bytes, name: str) -> SentencePieceEncoder:
    """Return the encoder of a SentencePiece model; `name` is its source in errors.

    Raises: DataError when the content is not a SentencePiece model, or the sentencepiece library is absent.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            f"{name}: a SentencePiece model needs the sentencepiece library; pip install 'megatrain[sentencepiece]'"
        ) from error
    try:
        if not content:
            raise RuntimeError("the file is empty")  # the library accepts empty content as "no model yet"
        return SentencePieceEncoder(sentencepiece.SentencePieceProcessor(model_proto=content), content)
    except RuntimeError as error:
        raise DataError(f"{name}: is not a SentencePiece model: {error}; give a tokenizer.model") from error


def _byte_symbols() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary: itself if it is printable in Latin-1,
    else the next unused one from U+0100 on."""
    others = itertools.count(NUM_BYTES)
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, NUM_BYTES)}
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _switched_off(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Switch off the settings that make tokens random or change the text, and yield a note on each."""
    if backend.truncation is not None:
        backend.no_truncation()
        yield "truncation, which would cut documents"
    if backend.padding is not None:
        backend.no_padding()
        yield "padding, which would add tokens"
    model = backend.model
    if getattr(model, "dropout", None):
        yield f"dropout {model.dropout:g} of merges, which makes two builds of one corpus differ"
        model.dropout = None
    if getattr(model, "fuse_unk", False):
        model.fuse_unk = False
        yield "fuse_unk, which would merge unknown characters into one token"
