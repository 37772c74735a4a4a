"""Sections [data] and [data_source]: which tokens to train and evaluate on.

There may be several sources: two tables [[data_source]] are the sections [data_source] and [data_source-2].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megatrain.config.options import option

MIN_WEIGHT = 1e-9
"""The smallest weight above 0: weights are rounded to multiples of it."""
MAX_WEIGHT = 1_000_000
NAME_PATTERN = r"[^,\n\r]*"
NAMES_OF_PICTURES = {"none": "", "drawn": "drawn pictures", "shards": "pictures.shards"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens to train and evaluate on."""

    train: str = option(
        "",
        "Training tokens: the path or URL of a .bin and .idx pair without the suffix. Several sources: "
        "[[data_source]].",
    )
    validation: str = option(
        "",
        "Held-out tokens: the path or URL of a .bin and .idx pair without the suffix. For several sets, use "
        "[[validation_set]]. Without either, there is no evaluation.",
    )
    tokenizer: str = option("", "Path of the tokenizer (tokenizer.json or NAME.model) that the tokens were made with.")
    pictures: Literal["none", "drawn", "shards"] = option(
        "none",
        "The pictures of training samples, for a model with model.picture_size. drawn: pictures of a few colored "
        "shapes that the program draws itself, with captions of three words as the text; needs no files. shards: "
        "those of pictures.shards, with their captions, which data.tokenizer converts to tokens, as the text. "
        "Pictures beside text: [[data_source]].",
    )
    seq_len: int = option(
        0,
        "Tokens of a training sample until a data stage changes it; at most model.seq_len. 0: model.seq_len.",
        unit="tokens",
        minimum=0,
    )
    block_tokens: int = option(
        0,
        "Tokens that stay together when data.part_tokens divides an epoch: a multiple of every sample length that "
        "the run will have. 0: the epoch is one block. With data.packing a block is 65,536 documents.",
        unit="tokens",
        minimum=0,
    )
    part_tokens: int = option(
        0,
        "Tokens of a source that are shuffled together: an epoch consists of parts of this size, and a part "
        "consists of blocks of data.block_tokens from all over the epoch, so it must be a multiple of that key. "
        "With data.packing, a part has as many blocks of documents as hold this number of tokens on average. After "
        "a change of the sample length, the rest of the current part comes in samples that are put together from "
        "windows of the old length; later parts are read in whole windows of the new length. The sample order "
        "depends on this key, so a run cannot change it. 0: the epoch is one part.",
        unit="tokens",
        minimum=0,
    )
    has_document_mask: bool = option(
        False, "Whether attention stops at the boundaries of the documents packed in one sample."
    )
    packing: Literal["none", "best_fit"] = option(
        "none",
        "How documents share samples. none: the token stream is cut every seq_len tokens. best_fit: "
        "documents that fit into a sample stay whole, and the rest of the sample is padding; needs "
        "data.has_document_mask, and the file that `megatrain data pack` makes for each pair and sample length.",
    )
    balance: Literal["none", "cost", "file"] = option(
        "none",
        "How the samples of a step are dealt to its micro-batches and replicas. none: in their order. cost: so "
        "that all replicas compute equally long, by the lengths of the documents and the pictures; needs "
        "data.has_document_mask, or sources with and without pictures. file: by the costs of documents in the file "
        "that `megatrain data costs` makes for each pair. The samples of a step are the same.",
    )
    accepted_digest: str = option(
        "",
        "Digests, separated by commas, of training data with which a run may continue although its checkpoint was "
        "trained on other data of the same size. The error message of the refused start shows the digests.",
        pattern="([0-9a-f]{32}(,[0-9a-f]{32})*)?",
    )
    bad_samples: Literal["refuse", "replace"] = option(
        "refuse",
        "What happens with a training sample that cannot be used: a token id is outside the vocabulary, a part of "
        "a .bin file cannot be read, a page of packed samples differs from its checksum, or a picture or its "
        "caption is broken. refuse: the run ends with an error that names the file and the byte, or the shard and "
        "the member. replace: the sample has no labels; all other samples stay as they are.",
    )
    seed: int = option(0, "Seed of the sample order. 0: train.seed.", minimum=0)
    prefetch: int = option(
        2,
        "Number of steps whose batches are read ahead. 0: each batch is read when it is needed.",
        unit="steps",
        minimum=0,
    )
    loader: Literal["thread", "host"] = option(
        "thread",
        "What reads batches. thread: a thread of each rank. host: one process on each host, once for all ranks "
        "that compute the same samples, into shared memory in checkpoint.arena_directory; x86-64 only.",
    )
    cache_directory: str = option(
        "",
        "Directory on a local disk in which a host keeps what it has read of data behind URLs, for all its jobs. "
        "Empty: the directory that TMPDIR names, else /var/tmp.",
    )
    cache_bytes: int = option(
        1 << 36, "Largest size of that cache, in bytes. The least recently used blocks are removed.", minimum=1 << 20
    )
    cache_block_bytes: int = option(
        1 << 20,
        "Bytes that are read at once from data behind a URL. Large blocks need fewer requests. Small ones transfer "
        "fewer unneeded bytes if a host reads only a small part of the data.",
        minimum=1 << 12,
        maximum=1 << 28,
    )
    readahead_blocks: int = option(
        64,
        "Blocks of data behind URLs that are fetched ahead of the step that is being read, in up to 16 threads. 0: "
        "each block is fetched when it is needed.",
        minimum=0,
        maximum=1 << 16,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceConfig:
    """One of several sets of training tokens, and its share of the samples.

    There may be up to 1024: two tables `[[data_source]]` are the same as `[data_source]` and `[data_source-2]`. Weights
    may be changed at any restart: each source then continues at its next sample.
    """

    path: str = option("", "Training tokens: the path or URL of a .bin and .idx pair without the suffix. Empty: none.")
    pictures: Literal["none", "drawn", "shards"] = option(
        "none",
        "The pictures of the samples of this source. none: its samples are text only, also in a model with "
        "model.picture_size. drawn, shards: see data.pictures; the captions are the text, so there is no path.",
    )
    name: str = option(
        "",
        'Name of the source in logs and checkpoints. Empty: the path, "drawn pictures" or "pictures.shards".',
        pattern=NAME_PATTERN,
    )
    weight: float = option(
        1.0,
        "Share of the samples, in proportion to the other weights. 0: none, until the weight is raised.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )
    max_epochs: float = option(
        0.0,
        "How often the run may read the source. Training does not start with weights and steps that need more. "
        "0: as often as needed.",
        unit="epochs",
        minimum=0,
    )

    @property
    def has_pictures(self) -> bool:
        return self.pictures != "none"

    @property
    def is_set(self) -> bool:
        """Whether the section names any data."""
        return bool(self.path) or self.has_pictures

    @property
    def resolved_name(self) -> str:
        return self.name or self.path or NAMES_OF_PICTURES[self.pictures]


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of `weights`, which are rounded to multiples of MIN_WEIGHT."""
    parts = [round(Fraction(repr(weight)) / Fraction(repr(MIN_WEIGHT))) for weight in weights]
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts) if divisor else tuple(parts)
