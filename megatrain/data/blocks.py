"""Blocks: the documents that one worker tokenizes at a time. Only the content of the corpus determines the blocks.

So the blocks, and all results in their order, are the same for any number of workers and after any interruption of a
build.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.data.corpus import Corpus, CorpusDocument, CorpusPosition

BLOCK_BYTES = 1 << 20
_BLOCK_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    """Some documents in the order of the corpus.

    `end`: the position after the last document. `skipped`: the number of records and files left out from the start of
    the corpus to `end`, by reason; the last block also counts those after `end`. `file_bytes`: about how many bytes of
    the corpus's files have been read; for compressed files, compressed bytes.
    """

    documents: tuple[CorpusDocument, ...]
    end: CorpusPosition
    skipped: Mapping[str, int]
    file_bytes: int

    @property
    def text_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)


def blocks(
    corpus: Corpus, file_sizes: Sequence[int], skipped: Counter[str], first: CorpusPosition
) -> Iterator[DocumentBlock]:
    """Yield the blocks of the corpus from `first` on, which is the start of the corpus or the end of a block.

    `skipped`: the number of records and files left out before `first`, by reason; those left out from `first` on are
    added.
    """
    documents: list[CorpusDocument] = []
    num_bytes = 0
    for document in corpus.documents(skipped, first):
        documents.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= BLOCK_BYTES or len(documents) >= _BLOCK_DOCUMENTS:
            yield _block(corpus, file_sizes, documents, skipped)
            documents, num_bytes = [], 0
    if documents:
        yield _block(corpus, file_sizes, documents, skipped)


def _block(
    corpus: Corpus, file_sizes: Sequence[int], documents: Sequence[CorpusDocument], skipped: Counter[str]
) -> DocumentBlock:
    last = documents[-1]
    file_bytes = sum(file_sizes[: last.file]) + corpus.files[last.file].file.position()
    return DocumentBlock(tuple(documents), CorpusPosition(last.file, last.record + 1), dict(skipped), file_bytes)
