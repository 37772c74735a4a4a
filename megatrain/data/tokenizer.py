"""Byte-level BPE tokenizers: train one, load one, and convert text into token ids and back.

The file is the common tokenizer.json of the `tokenizers` library, so that tokenizers from elsewhere can be used. Text
is data: a document that contains the text <|endoftext|> gets ordinary tokens, never the end-of-document token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.checkpoint_format.checkpoint_files import TOKENIZER_CONFIG_NAME
from megatrain.contracts.errors import DataError
from megatrain.data.end_of_document import (
    END_OF_DOCUMENT,
    KNOWN_NAMES,
    SmallFile,
    end_of_document,
    files_beside,
    no_files,
)

if TYPE_CHECKING:
    import tokenizers

SMALLEST_VOCAB_SIZE = 257
"""The 256 bytes and the end-of-document token."""


class Tokenizer:
    """A loaded tokenizer. `vocab_size` is its largest id plus one.

    `notes`: what its file asks for and is switched off, because it is random or changes the text. `end`: the token that
    ends every document, empty where none is known; `end_source`: what names it.
    Encoding a batch uses the library's threads. A fork after that is safe: the child then encodes in one thread.
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str, end: str = "", beside: SmallFile = no_files) -> None:
        """Raises: DataError when the vocabulary has no token `end`; "" finds the token (end_of_document.py)."""
        self.notes = tuple(_switched_off(backend))
        backend.encode_special_tokens = True
        self._backend = backend
        self._name = name
        vocabulary = backend.get_vocab(with_added_tokens=True)
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

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any special token."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Write tokenizer.json to `path`."""
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")


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
    return Tokenizer(backend, "the trained tokenizer")


def load_tokenizer(path: Path, end: str = "") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. `end`: the token that ends documents; "" finds it.

    Raises: DataError when the file is missing or is not a tokenizer, or the `tokenizers` library is absent.
    """
    _require_tokenizers()
    return parse_tokenizer(read_tokenizer_file(path), str(path), end, files_beside(path))


def parse_tokenizer(content: bytes, name: str, end: str = "", beside: SmallFile = no_files) -> Tokenizer:
    """Return the tokenizer from the content of a tokenizer.json; `name` is its source in errors.

    Raises: DataError when it is not a tokenizer, or the `tokenizers` library is absent.
    """
    _require_tokenizers()
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: is not UTF-8, so it is not a tokenizer.json") from error
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"{name}: is not a tokenizer.json of the tokenizers library: {error}") from error
    return Tokenizer(backend, name, end, beside)


def _switched_off(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Switch off what makes tokens random or loses text, and yield a note on each."""
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


def read_tokenizer_file(path: Path) -> bytes:
    """Return the content of a tokenizer.json.

    Raises: DataError when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: the tokenizer cannot be read: {error.strerror}; give a tokenizer.json") from error


def has_tokenizers() -> bool:
    """Return whether the `tokenizers` library is installed."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return False
    return True


def _require_tokenizers() -> None:
    if not has_tokenizers():
        raise DataError("tokenizing needs the tokenizers library; pip install 'megatrain[data]'")
