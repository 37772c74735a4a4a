"""Blocks: the documents that one process tokenizes at a time, cut from a corpus by its content alone.

So the blocks, and everything that is made of them in their order, are the same however many processes share them, and
wherever a build was interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain.data.corpus import Corpus, CorpusDocument, CorpusPlace

_BLOCK_BYTES = 1 << 20
_BLOCK_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    """Some documents in the order of the corpus.

    `end`: the place after the last one. `skipped`: the records that were left out from the start of the corpus to
    `end`, by reason. `file_bytes`: about how many bytes of the corpus's files have been read, compressed as they are.
    """

    documents: tuple[CorpusDocument, ...]
    end: CorpusPlace
    skipped: Mapping[str, int]
    file_bytes: int

    @property
    def text_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)


def blocks(
    corpus: Corpus, file_sizes: Sequence[int], skipped: Counter[str], first: CorpusPlace
) -> Iterator[DocumentBlock]:
    """Yield the documents of the corpus from `first` on, which is the end of a block.

    `skipped`: the records that were left out before `first`; those from there on are added.
    """
    documents: list[CorpusDocument] = []
    num_bytes = 0
    for document in corpus.documents(skipped, first):
        documents.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= _BLOCK_BYTES or len(documents) >= _BLOCK_DOCUMENTS:
            yield _block(corpus, file_sizes, documents, skipped)
            documents, num_bytes = [], 0
    if documents:
        yield _block(corpus, file_sizes, documents, skipped)


def _block(
    corpus: Corpus, file_sizes: Sequence[int], documents: Sequence[CorpusDocument], skipped: Counter[str]
) -> DocumentBlock:
    last = documents[-1]
    file_bytes = sum(file_sizes[: last.file]) + corpus.files[last.file].file.position()
    return DocumentBlock(tuple(documents), CorpusPlace(last.file, last.record + 1), dict(skipped), file_bytes)
