"""Tokenize blocks of documents in several processes, and return the results in the order of the blocks.

The processes are spawned, not forked, because the tokenizers library has threads. The kernel kills them when this
process exits for any reason.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.errors import MegatrainError
from megatrain.data.blocks import DocumentBlock
from megatrain.data.corpus import CorpusDocument
from megatrain.data.indexed import token_dtype
from megatrain.data.tokenizer import Tokenizer, TokenizerSource
from megatrain.programs.processes import install_parent_death_guard

DOCUMENT_DTYPE = np.dtype([("tokens", "<i8"), ("text_bytes", "<i8"), ("order_key", "<u8"), ("split_key", "<u8")])
"""What a build keeps of each document: its number of tokens with the end of the document, its bytes of text, and two
hashes of its identity. The first, keyed by the seed, determines the order; the second, whether it is held out."""
_BLOCKS_PER_WORKER = 2
"""One block is tokenized while the next one waits."""


@dataclass(frozen=True, slots=True)
class TokenizedBlock:
    """The token ids of a block as bytes, and its documents as bytes of DOCUMENT_DTYPE."""

    tokens: bytes
    documents: bytes
    num_tokens: int

    @property
    def num_documents(self) -> int:
        return len(self.documents) // DOCUMENT_DTYPE.itemsize


def tokenized(
    blocks: Iterable[DocumentBlock], source: TokenizerSource, seed: int, num_workers: int
) -> Iterator[tuple[DocumentBlock, TokenizedBlock]]:
    """Yield each block with its tokens, in order.

    num_workers: processes in addition to this one, which reads the corpus; with 1, this process does everything.
    Raises: MegatrainError when a process is killed.
    """
    if num_workers == 1:
        tokenizer = source.load()
        for block in blocks:
            yield block, tokenize(block, tokenizer, seed)
        return
    waiting: deque[tuple[DocumentBlock, Future[TokenizedBlock]]] = deque()
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))
    try:
        for block in blocks:
            waiting.append((block, pool.submit(_tokenize_in_worker, block, source, seed)))
            if len(waiting) == _BLOCKS_PER_WORKER * num_workers:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    except BrokenProcessPool as error:
        raise MegatrainError(
            "a process that tokenizes was killed, perhaps because the machine ran out of memory; the same command "
            "continues the build, with fewer --workers if necessary"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


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


def _begin(parent: int) -> None:
    install_parent_death_guard(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops its children
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenize_in_worker(block: DocumentBlock, source: TokenizerSource, seed: int) -> TokenizedBlock:
    return tokenize(block, _loaded(source), seed)


@functools.cache
def _loaded(source: TokenizerSource) -> Tokenizer:
    """Return the tokenizer, which a worker loads once."""
    return source.load()
