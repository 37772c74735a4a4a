"""Processes on one core that decode the same shards, and measure their CPU time: the sides of `pictures`."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

from megatrain.data.pictures.decoder import BATCH_PICTURES
from megatrain.data.pictures.decoders import make_decoder
from megatrain.data.pictures.decoding_record import DecodingRecord
from megatrain.data.pictures.picture_format import CPU, DALI, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.picture_source import PictureSource, Producers
from megatrain.data.pictures.producer import Producer
from megatrain.data.pictures.protocol import PRODUCER_LIMITS
from megatrain.peers.link import SECRET_BYTES, PeerAddress
from megatrain.peers.server import PeerServer, listen

FORMAT = PictureFormat(size=224, patch=14)
WIDTH, HEIGHT = 640, 480
_SEED = 1
_SECRET = bytes(SECRET_BYTES)


@dataclass(frozen=True, slots=True)
class Decoding:
    """`num_pictures` pictures, decoded in `seconds` with `cpu_s` seconds of CPU time of the side's process."""

    num_pictures: int
    seconds: float
    cpu_s: float


Decode = Callable[[int, int], Decoding]
"""Decodes pictures: the number of the first one, and how many."""


@contextmanager
def producer_on_last_core(directory: Path, decoder: str) -> Iterator[tuple[Producers, Callable[[], float]]]:
    """Yield a producer in a process on the last core, and a function that returns the CPU seconds that it has used."""
    with _process(_produce, directory, decoder) as connection:
        yield Producers([PeerAddress(*connection.recv())], _SECRET), lambda: _cpu_s(connection)


@contextmanager
def producer_side(directory: Path) -> Iterator[Decode]:
    """Yield a function that requests pictures from a producer. Only the producer's CPU time counts."""
    index = PictureIndex(directory)
    with (
        producer_on_last_core(directory, DALI) as (producers, cpu_s),
        PictureSource(index.digest, FORMAT, producers) as source,
    ):

        def decode(first: int, count: int) -> Decoding:
            numbers = [number % index.num_samples for number in range(first, first + count)]
            began, cpu_began = time.perf_counter(), cpu_s()
            source.patches(numbers)
            return Decoding(count, time.perf_counter() - began, cpu_s() - cpu_began)

        yield decode


@contextmanager
def bare_side(directory: Path) -> Iterator[Decode]:
    """Yield a function that runs a pipeline of DALI, which reads the shards itself."""
    with _process(_run_pipeline, directory) as connection:

        def decode(_first: int, count: int) -> Decoding:
            connection.send(count)
            decoding: Decoding = connection.recv()
            return decoding

        yield decode


@contextmanager
def _process(target: Callable[..., None], *arguments: Path | str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _cpu_s(connection: Connection) -> float:
    connection.send(None)
    seconds: float = connection.recv()
    return seconds


def _produce(directory: Path, decoder: str, connection: Connection) -> None:
    _use_one_core()
    record = DecodingRecord(os.memfd_create("note"), os.memfd_create("ends"))
    producer = Producer([PictureIndex(directory)], make_decoder(decoder), record)
    listener = listen("127.0.0.1")
    PeerServer(listener, _SECRET, producer.serve, PRODUCER_LIMITS, has_low_priority=False)
    connection.send(listener.getsockname()[:2])

    def report() -> None:
        while True:
            connection.recv()
            connection.send(time.process_time())

    threading.Thread(target=report, daemon=True).start()
    producer.run()


def _run_pipeline(directory: Path, connection: Connection) -> None:
    from nvidia.dali import Pipeline, fn, types

    _use_one_core()
    shards = [str(directory / shard.name) for shard in PictureIndex(directory).shards]

    size = [FORMAT.size, FORMAT.size]
    pipeline = Pipeline(batch_size=BATCH_PICTURES, num_threads=1, device_id=None)
    with pipeline:
        encoded = fn.readers.webdataset(paths=shards, ext=["jpg"], missing_component_behavior="error")
        decoded = fn.decoders.image(encoded, device=CPU, output_type=types.RGB)
        pipeline.set_outputs(fn.resize(decoded, size=size, interp_type=types.INTERP_LINEAR, antialias=True))
    pipeline.build()
    while True:
        count = connection.recv()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(0, count, BATCH_PICTURES):
            pipeline.run()
        connection.send(Decoding(count, time.perf_counter() - began, time.process_time() - cpu_began))


def _use_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def write_shard(path: Path, num_pictures: int) -> int:
    """Write JPEG files of noise on soft colors, with captions; return their mean size."""
    random = np.random.default_rng(_SEED)
    num_bytes = 0
    with tarfile.open(path, "w") as tar:
        for number in range(num_pictures):
            coarse = random.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
            soft = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
            noisy = soft + random.normal(0, 8, (HEIGHT, WIDTH, 1))
            stream = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
            num_bytes += len(stream.getvalue())
            for name, content in ((f"{number:06}.jpg", stream.getvalue()), (f"{number:06}.txt", b"caption")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return num_bytes // num_pictures
