"""Tokenize blocks of documents in several threads or processes, and return the results in the order of the blocks.

An encoder that releases the interpreter lock runs in threads of this process: they share its tokenizer, and start at
once. More than MAX_THREADS threads would wait for the lock too long, so for more workers, and for other encoders,
processes are used (worker_pool.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from megatrain.data.blocks import BLOCK_BYTES, DocumentBlock
from megatrain.data.corpus import CorpusDocument
from megatrain.data.indexed import token_dtype
from megatrain.data.tokenizer import Tokenizer, TokenizerSource
from megatrain.data.worker_pool import in_processes, in_threads

DOCUMENT_DTYPE = np.dtype([("tokens", "<i8"), ("text_bytes", "<i8"), ("order_key", "<u8"), ("split_key", "<u8")])
"""What a build keeps of each document: its number of tokens with the end of the document, its bytes of text, and two
hashes of its identity. The first, keyed by the seed, determines the order; the second, whether it is held out."""
MAX_THREADS = 8
"""Each thread needs the interpreter lock for about 3 % of its time."""
_BYTES_PER_PROCESS = 8_000_000
"""Text that makes one more process worthwhile: while a process starts, another one tokenizes a few megabytes."""
_TASK = "tokenizes"
_HINT = "the same command continues the build, with fewer --workers if necessary"
_PARALLELISM = "TOKENIZERS_PARALLELISM"
"""The variable of the tokenizers library for its own threads, which would all work on the same block."""


@dataclass(frozen=True, slots=True)
class TokenizedBlock:
    """The token ids of a block as bytes, and its documents as bytes of DOCUMENT_DTYPE."""

    tokens: bytes
    documents: bytes
    num_tokens: int

    @property
    def num_documents(self) -> int:
        return len(self.documents) // DOCUMENT_DTYPE.itemsize


def default_workers(num_bytes: int, num_cores: int, tokenizer: Tokenizer) -> int:
    """Return how many threads or processes are worthwhile for a text of `num_bytes`."""
    num_processes = min(num_cores, 1 + num_bytes // _BYTES_PER_PROCESS)
    if not tokenizer.runs_in_threads or num_processes > MAX_THREADS:
        return num_processes
    return min(num_cores, MAX_THREADS, 1 + num_bytes // BLOCK_BYTES)


def tokenized(
    blocks: Iterable[DocumentBlock], tokenizer: Tokenizer, source: TokenizerSource, seed: int, num_workers: int
) -> Generator[tuple[DocumentBlock, TokenizedBlock]]:
    """Yield each block with its tokens, in the order of `blocks`.

    source: from which other processes load `tokenizer`. num_workers: threads or processes that tokenize, while this
    thread reads the corpus; with 1, this thread does everything.
    Raises: MegatrainError when a process ends, or a process or thread cannot be started.
    """
    with _one_thread_a_call():
        if num_workers == 1:
            for block in blocks:
                yield block, tokenize(block, tokenizer, seed)
        elif tokenizer.runs_in_threads and num_workers <= MAX_THREADS:
            work = functools.partial(tokenize, tokenizer=tokenizer, seed=seed)
            yield from in_threads(work, blocks, num_workers, task=_TASK, hint=_HINT)
        else:
            yield from in_processes(
                functools.partial(_tokenize_in_worker, source=source, seed=seed),
                blocks,
                num_workers,
                task=_TASK,
                hint=_HINT,
            )


@contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Have the tokenizers library encode in the calling thread, also in processes that begin meanwhile."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def tokenize(block: DocumentBlock, tokenizer: Tokenizer, seed: int) -> TokenizedBlock:
    """Return the tokens of a block. Each document ends with the tokenizer's end of a document."""
    dtype = token_dtype(tokenizer.vocab_size)
    ids = tokenizer.encode_batch([document.text for document in block.documents])
    documents = np.zeros(len(ids), DOCUMENT_DTYPE)
    documents["tokens"] = [len(some) + 1 for some in ids]
    documents["text_bytes"] = [document.num_bytes for document in block.documents]
    documents["order_key"] = [identity_hash(document, seed) for document in block.documents]
    documents["split_key"] = [identity_hash(document) for document in block.documents]
    ends = (tokenizer.eod_id,)
    flat = itertools.chain.from_iterable(itertools.chain(some, ends) for some in ids)
    tokens = np.fromiter(flat, dtype, int(documents["tokens"].sum()))
    return TokenizedBlock(tokens.tobytes(), documents.tobytes(), len(tokens))


def identity_hash(document: CorpusDocument, seed: int | None = None) -> int:
    """Return a 64-bit hash of the document's identity, keyed by `seed` if given."""
    identity = f"{document.name}\0{document.record}".encode("utf-8", "surrogateescape")
    key = b"" if seed is None else str(seed).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8, key=key).digest(), "little")


def _tokenize_in_worker(block: DocumentBlock, source: TokenizerSource, seed: int) -> TokenizedBlock:
    return tokenize(block, _loaded(source), seed)


@functools.cache
def _loaded(source: TokenizerSource) -> Tokenizer:
    """Return the tokenizer, which a worker loads once."""
    return source.load()
