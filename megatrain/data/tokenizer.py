"""Tokenizers: train one, load one, and convert text into token ids and back.

A tokenizer comes from a tokenizer.json of the `tokenizers` library or from a SentencePiece model (NAME.model), so that
tokenizers from elsewhere can be used; the tokenizer `bytes` needs no file. The text <|endoftext|> in a document becomes
ordinary tokens, never the end-of-document token.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_CONFIG_NAME, is_sentencepiece
from megatrain.contracts.errors import DataError
from megatrain.data.encoders import ByteEncoder, Encoder, LibraryEncoder, sentencepiece_encoder
from megatrain.data.end_of_document import (
    END_OF_DOCUMENT,
    KNOWN_NAMES,
    SmallFile,
    end_of_document,
    files_beside,
    no_files,
)
from megatrain.data.remote_path import DataPath

BYTES = "bytes"
"""The name of the tokenizer whose tokens are the bytes of UTF-8."""
SMALLEST_VOCAB_SIZE = 257
"""The 256 bytes and the end-of-document token."""
_RARE = ("\u0531", "\ua4d0", "\U00010450", "\U00013000")
"""Letters of four scripts (Armenian, Lisu, Shavian, hieroglyphs), of two to four bytes of UTF-8. A vocabulary has all
of them only if it has bytes."""


class Tokenizer:
    """A loaded tokenizer. `vocab_size` is its largest id plus one.

    `notes`: the settings of its file that are switched off, because they are random or change the text. `losses`: the
    text that it cannot represent; empty if it can represent any text. `end`: the token that ends every document, empty
    if none is known; `end_source`: the file or list that names this token. `file_name`: tokenizer.json or
    tokenizer.model. `runs_in_threads`: whether `encode_batch` releases the interpreter lock, so that several threads
    tokenize at the same time.
    """

    def __init__(self, encoder: Encoder, name: str, end: str = "", beside: SmallFile = no_files) -> None:
        """If `end` is empty, the token is looked up (end_of_document.py).

        Raises: DataError when the vocabulary has no token `end`.
        """
        self.notes = encoder.notes
        self.losses = (*encoder.losses, *_lost_characters(encoder))
        self.file_name = encoder.file_name
        self.runs_in_threads = encoder.runs_in_threads
        self._encoder = encoder
        self._name = name
        vocabulary = encoder.vocabulary()
        if end and end not in vocabulary:
            raise DataError(f"{name}: has no token {end!r}, which should end documents; name a token of its vocabulary")
        self.end, self.end_source = (end, "as given") if end else end_of_document(vocabulary, beside)
        self._eod_id = vocabulary.get(self.end)
        self.vocab_size: int = max(vocabulary.values()) + 1

    @property
    def eod_id(self) -> int:
        """The id of `end`. Raises: DataError when no end-of-document token is known."""
        if self._eod_id is None:
            raise DataError(
                f"{self._name}: names no token that ends documents, and its vocabulary has none of "
                f"{', '.join(map(ascii, KNOWN_NAMES))}; give the token with --eod, or put a {TOKENIZER_CONFIG_NAME} "
                "with its eos_token beside the file"
            )
        return self._eod_id

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token."""
        return self._encoder.vocabulary()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special token."""
        return self._encoder.encode([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any special token."""
        return self._encoder.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens (SentencePiece leaves out its control symbols)."""
        return self._encoder.decode(ids)

    def save(self, path: Path) -> None:
        """Write the tokenizer's file to `path`."""
        path.write_bytes(self._encoder.content())


def _lost_characters(encoder: Encoder) -> Iterator[str]:
    """Yield a text on the characters that an encoder loses, if there are any."""
    lost = [
        letter for letter, ids in zip(_RARE, encoder.encode(_RARE), strict=True) if letter not in encoder.decode(ids)
    ]
    if lost:
        named = ", ".join(f"U+{ord(letter):04X}" for letter in lost)
        yield f"characters that its vocabulary lacks, such as {named}: it has no bytes to fall back to"


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The source from which each process loads the tokenizer. `path`: its file; None: the tokenizer `bytes`."""

    path: Path | None
    end: str = ""

    def load(self) -> Tokenizer:
        """Load the tokenizer. Raises: DataError as `load_tokenizer`."""
        return byte_tokenizer(self.end) if self.path is None else load_tokenizer(self.path, self.end)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; the same texts always give the same file.

    Raises: DataError when `vocab_size` is below 257 or the `tokenizers` library is absent.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size} must be at least {SMALLEST_VOCAB_SIZE} (256 bytes and {END_OF_DOCUMENT})"
        )
    _require_tokenizers()
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(LibraryEncoder(backend), "the trained tokenizer")


def byte_tokenizer(end: str = "") -> Tokenizer:
    """Return the tokenizer whose ids are the bytes of UTF-8. `end`: as for `load_tokenizer`.

    Raises: DataError when the `tokenizers` library is absent, or the vocabulary has no token `end`.
    """
    _require_tokenizers()
    return Tokenizer(ByteEncoder(), "the tokenizer of bytes", end)


def load_tokenizer(path: DataPath, end: str = "") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json or a SentencePiece model (NAME.model).

    `end`: the token that ends documents; if it is "", the token is looked up.
    Raises: DataError when the file cannot be read or is not a tokenizer, its vocabulary has no token `end`, or its
    library is absent.
    """
    return parse_tokenizer(read_tokenizer_file(path), str(path), end, files_beside(path))


def parse_tokenizer(content: bytes, name: str, end: str = "", beside: SmallFile = no_files) -> Tokenizer:
    """Return the tokenizer from the content of its file; `name` is its source, and the suffix determines its kind.

    Raises: DataError when the content is not a tokenizer, its vocabulary has no token `end`, or its library is absent.
    """
    encoder = sentencepiece_encoder(content, name) if is_sentencepiece(name) else _library_encoder(content, name)
    return Tokenizer(encoder, name, end, beside)


def _library_encoder(content: bytes, name: str) -> LibraryEncoder:
    _require_tokenizers()
    from tokenizers import Tokenizer as Backend

    try:
        return LibraryEncoder(Backend.from_str(content.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: is not UTF-8, so it is not a tokenizer.json") from error
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{name}: is not a tokenizer.json of the tokenizers library: {error}") from error


def read_tokenizer_file(path: DataPath) -> bytes:
    """Return the content of a tokenizer's file.

    Raises: DataError when the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: the tokenizer cannot be read: {error.strerror}; give a tokenizer.json or a SentencePiece .model"
        ) from error


def has_library_of(tokenizer: Path) -> bool:
    """Return whether the library that a tokenizer's file needs is installed."""
    return _is_installed("sentencepiece" if is_sentencepiece(tokenizer.name) else "tokenizers")


def _is_installed(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


def _require_tokenizers() -> None:
    if not _is_installed("tokenizers"):
        raise DataError("tokenizing needs the tokenizers library; pip install 'megatrain[data]'")
