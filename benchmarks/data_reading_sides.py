"""The sides of `data_reading`: processes that read samples on request, and measure it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

OURS, PEER = "megatrain", "GPTDataset"
SEQ_LEN = 4096
VOCAB_SIZE = 32_000
STEP_SAMPLES = 32
SEED = 1


@dataclass(frozen=True, slots=True)
class ReadingCase:
    """How samples are read. has_documents: with the side's means against attention across document boundaries."""

    has_documents: bool
    micro_batch_size: int

    def text(self) -> str:
        """Return the case in words."""
        return f"{'documents' if self.has_documents else 'no documents'}, micro-batches of {self.micro_batch_size}"


@dataclass(frozen=True, slots=True)
class Reading:
    """`num_samples` samples, read in `seconds`, with `cpu_s` seconds of CPU time in all threads."""

    num_samples: int
    seconds: float
    cpu_s: float


Read = Callable[[ReadingCase, int, int], None]
"""Reads samples: the case, the number of the first one, and how many."""


@contextmanager
def reading_process(side: str, prefix: Path) -> Iterator[Callable[[ReadingCase, int, int], Reading]]:
    """Yield a function that reads samples of the token files at `prefix` in a process of a side, and measures it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(side, prefix, theirs))
    process.start()
    theirs.close()

    def read(case: ReadingCase, first: int, count: int) -> Reading:
        ours.send((case, first, count))
        reading: Reading = ours.recv()
        return reading

    try:
        yield read
    finally:
        ours.close()
        process.join()


def _serve(side: str, prefix: Path, requests: Connection) -> None:
    read = {OURS: _batch_reader, PEER: _gpt_dataset}[side](prefix)
    while True:
        try:
            case, first, count = requests.recv()
        except EOFError:
            return
        began, cpu_began = time.perf_counter(), time.process_time()
        read(case, first, count)
        requests.send(Reading(count, time.perf_counter() - began, time.process_time() - cpu_began))


def _batch_reader(prefix: Path) -> Read:
    from megatrain.contracts.step_plan import Dealing, StepPlan
    from megatrain.data.dataset import open_dataset
    from megatrain.data.order import SampleOrder
    from tests.helpers.one_source import reader_of_one

    dataset, _ = open_dataset(prefix, VOCAB_SIZE)
    order = SampleOrder(dataset.num_tokens, SEQ_LEN, SEED)

    def read(case: ReadingCase, first: int, count: int) -> None:
        reader = reader_of_one(dataset, order, case.has_documents)
        for cursor in range(first, first + count, STEP_SAMPLES):
            dealing = Dealing(STEP_SAMPLES // case.micro_batch_size, 1)
            reader.read_step(StepPlan(cursor, STEP_SAMPLES, case.micro_batch_size, dealing), 0)

    return read


def _gpt_dataset(prefix: Path) -> Read:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(vocab_size=VOCAB_SIZE, eod=0, pad=-1, unique_identifiers={"class": "none"})

    @cache
    def dataset(has_documents: bool) -> Any:
        config = GPTDatasetConfig(
            random_seed=SEED, sequence_length=SEQ_LEN, blend=([str(prefix)], None), split="1,0,0",
            path_to_cache=str(prefix.parent / "cache"), tokenizer=tokenizer, create_attention_mask=False,
            reset_position_ids=has_documents, reset_attention_mask=has_documents, eod_mask_loss=has_documents,
        )  # fmt: skip
        tokens = GPTDataset.build_low_level_dataset(str(prefix), config)
        documents = np.arange(len(tokens.sequence_lengths), dtype=np.int32)
        return GPTDataset(tokens, str(prefix), documents, None, Split.train, config)

    for has_documents in (False, True):
        dataset(has_documents)  # builds its index

    def read(case: ReadingCase, first: int, count: int) -> None:
        samples = dataset(case.has_documents)
        for number in range(first, first + count):
            samples[number % len(samples)]

    return read
