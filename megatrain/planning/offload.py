"""The memory of blocks whose activations wait in host memory: see megatrain/parallel/offload.py.

Beside a running block there are the activations of the block before it: in forward they leave, in backward they have
come back. Those of a chunk's last block have no time to leave.
"""

from __future__ import annotations

from megatrain.planning.footprint import Footprint
from megatrain.planning.tensor_bytes import TensorBytes


def offloaded_blocks(
    block: Footprint, num_blocks: int, num_offloaded: int, sizes: TensorBytes, *, staying: int, is_input_held: bool
) -> list[Footprint]:
    """Return the footprints of a chunk's blocks, of which the first `num_offloaded` offload.

    staying: bytes that each of these keeps on the device all the same. is_input_held: the chunk's input, which the
    first block keeps, is also kept by the pipeline.
    """
    before_any = staying + sizes.hidden_local * is_input_held
    parts = []
    for number in range(num_blocks):
        own_stay = before_any if number == 0 else staying
        is_away = number < min(num_offloaded, num_blocks - 1)
        passing = block.kept if 0 < number <= num_offloaded else 0
        if sizes.is_on_cpu:
            parts.append(_on_one_memory(block, passing, is_offloaded=number < num_offloaded))
            continue
        held_twice = sizes.hidden_local if number == 0 and is_input_held and is_away else 0
        parts.append(
            Footprint(
                own_stay if is_away else block.kept,
                block.forward + passing,
                block.backward + passing + held_twice,
                on_host=block.kept - staying if is_away else 0,
                put_off=block.put_off,
            )
        )
    return parts


def _on_one_memory(block: Footprint, passing: int, *, is_offloaded: bool) -> Footprint:
    """On a CPU the copies count as well: there are two of what is being copied, and else one."""
    copied = 2 * block.kept if is_offloaded else 0
    return Footprint(
        block.kept,
        max(block.forward + passing, copied),
        max(block.backward, block.kept + passing),
        put_off=block.put_off,
    )
