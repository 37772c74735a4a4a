"""How much memory a rank's tensors take in a training step, computed from configuration and layout alone.

Standing: parameters, gradients, optimizer state, inputs. Passing: activations of the micro-batches in flight, what the
running part works with, messages, gradients on their way. The peak is the largest moment of forward and backward; an
update works in place. Not counted: what an allocator rounds up, what operations and communication libraries use inside.
Measured against counted tensor bytes by benchmarks/memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.planning.chunks import PlannedChunk
from megatrain.planning.step_memory import ChunkMemory, StepWalk
from megatrain.planning.tensor_bytes import ELEMENT_BYTES, TensorBytes, tensor_bytes
from megatrain.schedule import peak_in_flight


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's tensors at the fullest moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    """Master weights, where they are not the parameters themselves, and two moments."""
    inputs: int
    """Tokens, labels and documents of a step, rotary tables."""
    activations: int
    """Kept for backward by the micro-batches in flight."""
    working: int
    """Temporaries of what runs at that moment."""
    messages: int
    """Activations and gradients that come from, or go to, other stages."""
    travelling: int
    """Copies of gradients that are reduced."""
    moment: str
    """What runs when most is alive."""
    num_in_flight: int
    """Most micro-batches of a chunk between forward and backward."""
    on_host: int = 0
    """Activations that wait in host memory, at most; not part of the total, which is the device's."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind, in the order of the fields."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "inputs": self.inputs,
            "activations": self.activations,
            "working": self.working,
            "messages": self.messages,
            "travelling": self.travelling,
        }


def estimate_memory(config: Config, layout: Layout, stage: int, chunks: Sequence[PlannedChunk]) -> RankMemory:
    """Return the memory of every rank of `stage`; dp and tp ranks of a stage are alike.

    chunks: from plan_stage.
    Raises: TopologyError when the schedule cannot be built.
    """
    parallel, sizes = config.parallel, tensor_bytes(config, layout.tp_size)
    buckets = [chunk.bucket_sizes(parallel.bucket_size, layout.dp_size) for chunk in chunks]
    shares = [numel // layout.dp_size * sizes.sum_element for numels in buckets for numel in numels]
    num_elements = sum(map(sum, buckets))

    num_microbatches = config.num_microbatches(layout.dp_size)
    schedule = parallel.build_schedule(num_microbatches)
    chunk_memory = [
        _chunk_memory(config, layout, chunk, numels, sizes) for chunk, numels in zip(chunks, buckets, strict=True)
    ]
    walk = StepWalk(config, stage, chunk_memory, sizes.hidden_local)
    peak = walk.run(schedule.stages[stage])
    return RankMemory(
        parameters=num_elements * sizes.element,
        gradients=sum(shares) if parallel.zero_stage == 2 else num_elements * sizes.sum_element,
        optimizer=sum(shares) * (3 if sizes.is_mixed else 2),
        inputs=num_microbatches * _input_bytes(config, sizes) + _table_bytes(config, sizes) * len(chunks),
        activations=peak.activations,
        working=peak.working,
        messages=peak.messages,
        travelling=peak.travelling,
        moment=peak.what,
        num_in_flight=peak_in_flight(schedule)[stage],
        on_host=walk.most_on_host,
    )


def _chunk_memory(
    config: Config, layout: Layout, chunk: PlannedChunk, numels: Sequence[int], sizes: TensorBytes
) -> ChunkMemory:
    """ZeRO-1 reduces gradients in place, ZeRO-2 lets them go and keeps its share; in another type a copy travels."""
    is_copied = config.parallel.grad_reduce_dtype == "bf16" and layout.dp_size > 1
    reduced = ELEMENT_BYTES["bf16"] if is_copied else sizes.sum_element
    travelling = sum(numels) * reduced if is_copied or config.parallel.zero_stage == 2 else 0
    exchanged = 0
    if layout.dp_size > 1:
        # where ranks exchange their parts and sum them themselves (Group.reduce_scatter), what arrives has memory of
        # its own: on CPUs of the bucket that travels and the next one, else of all
        if is_copied:
            share = sum(numels) // layout.dp_size * sizes.sum_element if config.parallel.zero_stage == 2 else 0
            travelling += share + (0 if sizes.is_on_cpu else sum(numels) * reduced)
        if sizes.is_on_cpu:
            exchanged = sum(sorted(numels)[-2:]) * reduced
    return ChunkMemory(
        footprint=chunk.footprint(config, sizes),
        whole_gradients=sum(numels) * sizes.sum_element,
        travelling=travelling,
        exchanged=exchanged,
        copied=sum(numels) * reduced if is_copied else 0,
    )


def _input_bytes(config: Config, sizes: TensorBytes) -> int:
    return sizes.token * (3 if config.data.has_document_mask else 2)


def _table_bytes(config: Config, sizes: TensorBytes) -> int:
    if config.model.positions != "rope":
        return 0
    return config.model.seq_len * config.model.resolved_head_dim * sizes.sum_element
