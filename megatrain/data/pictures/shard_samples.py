"""Pictures of shards as a source of samples: their order, and what producers answer for the samples of a step.

Each epoch of training shows every picture of the index once, in another order; held-out pictures keep the order of the
index. The tokens of a sample are its caption between two end-of-document tokens; a caption that is too long for its
sample is cut.
Shapes: N samples, P patches, C bytes of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.contracts.errors import DataError
from megatrain.data.dataset import tokenizer_digest
from megatrain.data.one_piece_order import OnePieceOrder
from megatrain.data.patches import Patches
from megatrain.data.permutation import epoch_keys, mixed, permuted
from megatrain.data.pictures.bad_picture import BadPicture, BadPictureError
from megatrain.data.pictures.picture_format import REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.picture_source import PictureSource, Producers
from megatrain.data.remote_file import RemoteBlock
from megatrain.data.token_stream import Int64, SamplePieces
from megatrain.data.tokenizer import Tokenizer, load_tokenizer
from megatrain.data.training_source import TrainingSource

_DIGEST_DIGITS = 32
_TOKENIZER_DIGITS = 12


@dataclass(frozen=True, slots=True)
class AnsweredSamples:
    """Which samples of the source were asked for, and where their captions are in the stream of this answer.

    place_of: the place of a sample in the answer, by its number in the order of the source. bounds: the caption at
    place n is from bounds[n] to bounds[n + 1]. bad: the bad pictures, by place. Shapes: bounds [N + 1].
    """

    place_of: dict[int, int] = field(default_factory=dict)
    bounds: Int64 = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    bad: dict[int, BadPicture] = field(default_factory=dict)

    def places(self, indices_N: Int64) -> Int64:
        """Return the places of samples that were asked for. Shapes: all [N]."""
        return np.array([self.place_of[index] for index in indices_N.tolist()], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ShardOrder(OnePieceOrder):
    """The order of the pictures of an index: a SourceOrder. num_patches: the positions of a sample before its caption.

    is_shuffled: if false, the order is that of the index. answered: the samples whose pieces can be found.
    """

    num_patches: int = 0
    is_shuffled: bool = True
    answered: AnsweredSamples = field(default_factory=AnsweredSamples)

    def numbers(self, indices_N: Int64) -> Int64:
        """Return the numbers of samples in the index. Shapes: all [N]."""
        epochs, places = np.divmod(indices_N, self.num_samples)
        if not self.is_shuffled:
            return places
        return permuted(places, self.num_samples, mixed(epoch_keys(self.seed, epochs)))

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return the caption of each sample as its only piece. Raises: BadPictureError for a picture that is bad."""
        cursors = np.asarray(cursors, dtype=np.int64)
        places = self.answered.places(cursors)
        for place in places.tolist():
            if place in self.answered.bad:
                raise BadPictureError(self.answered.bad[place])
        starts, ends = self.answered.bounds[places], self.answered.bounds[places + 1]
        labels = np.minimum(ends - starts - 1, self.lengths(cursors) - self.num_patches)
        return SamplePieces(starts, labels, np.arange(len(places) + 1, dtype=np.int64))


def _no_numbers() -> Int64:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ShardCaptions:
    """The captions of an answer end to end: a TokenStream. Each caption is a document.

    num_tokens: the number of the pictures of the index; the number of all tokens is not known.
    """

    num_tokens: int
    tokens: Int64 = field(default_factory=_no_numbers)
    starts: Int64 = field(default_factory=_no_numbers)
    cache_use: None = None

    def window(self, start: int, length: int) -> Int64:
        """Return tokens of the stream."""
        return self.tokens[start : start + length]

    def document_starts_between(self, first: int, last: int) -> Int64:
        """Return where captions begin, from `first` to before `last`."""
        return self.starts[(self.starts >= first) & (self.starts < last)]

    def remote_blocks(self, start: int, length: int) -> Iterable[RemoteBlock]:
        """Return no blocks: captions come from producers."""
        return ()


@dataclass(frozen=True, slots=True)
class AnsweredPictures:
    """The pictures of an answer: SamplePictures. Shapes: patches [N, P, C]."""

    patches_NPC: Patches
    answered: AnsweredSamples

    @property
    def num_patches(self) -> int:
        return int(self.patches_NPC.shape[1])

    def patches(self, indices_N: Int64) -> Patches:
        """Return the pictures of samples that were asked for. Shapes: result [N, P, C]."""
        return self.patches_NPC[self.answered.places(indices_N)]


class ShardSamples:
    """The pictures and captions of an index: SamplePictures that producers must be asked for first.

    directory: of the index. tokenizer: its file. decoder: the identity of what the producers decode with; empty: not
    known yet.
    Raises: DataError when the index or the tokenizer cannot be used.
    """

    def __init__(self, directory: Path, picture_format: PictureFormat, tokenizer: Path, decoder: str = "") -> None:
        self.index = PictureIndex(directory)
        self.format = picture_format
        self.tokenizer = tokenizer
        self.decoder = decoder
        self._source: PictureSource | None = None

    @property
    def num_patches(self) -> int:
        return self.format.num_patches

    def patches(self, indices_N: Int64) -> Patches:
        """Raises: DataError, always: only the source that `TrainingSource.prepared` returns has pictures."""
        raise DataError(f"{self.index.path}: pictures must be asked for before they are read")

    @property
    def made_by(self) -> str:
        """What determines the patches of a picture and the tokens of its caption, and which pictures are bad."""
        assert self.decoder, "the decoder is not known yet"
        tokenizer = tokenizer_digest(self.tokenizer)[:_TOKENIZER_DIGITS]
        return f"{self.decoder}, at most {self.format.max_pixels} pixels, tokenizer {tokenizer}"

    def connect(self, producers: Producers) -> PictureSource:
        """Ask these producers from now on; return the source that asks them, which the caller closes.

        It replaces bad pictures, so that the reader decides by its own policy whether they are errors.
        """
        self._source = PictureSource(self.index.digest, self.format, producers, REPLACE, self.decoder)
        return self._source

    def check_tokenizer(self, vocab_size: int) -> None:
        """Raise DataError when the tokenizer has more tokens than the model, or no token that ends documents."""
        tokenizer = self.loaded_tokenizer
        if max(tokenizer.vocab_size, tokenizer.eod_id + 1) > vocab_size:
            raise DataError(
                f"{self.tokenizer}: has {tokenizer.vocab_size} tokens, more than model.vocab_size={vocab_size}; set "
                f"model.vocab_size={tokenizer.vocab_size}"
            )

    @cached_property
    def loaded_tokenizer(self) -> Tokenizer:
        """The tokenizer of the captions. Raises: DataError as `load_tokenizer`."""
        return load_tokenizer(self.tokenizer)

    def source(self, name: str, seed: int, section: str = "", *, is_shuffled: bool = True) -> TrainingSource:
        """Return the source of samples. name, section: see StreamSource and TrainingSource."""
        num_pictures = self.index.num_samples
        identity = StreamSource(name, num_pictures, self.index.digest[:_DIGEST_DIGITS])
        order = ShardOrder(seed, num_pictures, num_patches=self.num_patches, is_shuffled=is_shuffled)
        return TrainingSource(
            identity, ShardCaptions(num_pictures), order, section, pictures=self, prepare=self._prepared
        )

    def _prepared(self, source: TrainingSource, indices_N: Int64) -> TrainingSource:
        """Return the source with the pictures and captions of these samples.

        Raises: UnreachableError when no producer answers; DataError when a producer refuses, or has other data.
        """
        assert isinstance(source.order, ShardOrder)
        if self._source is None:
            raise DataError(f"{self.index.path}: pictures are asked for before there are producers")
        numbers = source.order.numbers(indices_N).tolist()
        found = self._source.patches(numbers)
        end = self.loaded_tokenizer.eod_id
        captions = [[end, *ids, end] for ids in self.loaded_tokenizer.encode_batch(found.captions)]
        bounds = np.cumsum([0, *map(len, captions)], dtype=np.int64)
        bad_of = {bad.number: bad for bad in found.bad}
        bad = {place: bad_of[number] for place, number in enumerate(numbers) if number in bad_of}
        answered = AnsweredSamples({index: place for place, index in enumerate(indices_N.tolist())}, bounds, bad)
        tokens = np.array([token for caption in captions for token in caption], dtype=np.int64)
        return replace(
            source,
            dataset=ShardCaptions(source.dataset.num_tokens, tokens, bounds[:-1]),
            order=replace(source.order, answered=answered),
            pictures=AnsweredPictures(found.patches_NPV, answered),
            works=found.works,
        )
