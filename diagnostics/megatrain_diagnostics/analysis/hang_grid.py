"""Draws all ranks of a job as letters on a grid of its axes: waiting, suspected, outlier or silent.

A line is a replica (dp), a block is a stage, and a letter is a rank of that replica and stage (MegaScale fig. 8). Equal
neighboring lines are drawn once, because few of 12,288 ranks differ.
"""

from __future__ import annotations

from collections.abc import Collection

from megatrain.contracts.layout import STAGES, Layout

SUSPECT, OUTLIER, SILENT, WAITING, OTHER = "X", "o", "?", "w", "."
LEGEND = f"{SUSPECT} suspect, {OUTLIER} stack differs from the others, {SILENT} silent, {WAITING} waits, {OTHER} other"


def rank_letters(
    layout: Layout,
    suspects: Collection[int],
    outliers: Collection[int],
    silent: Collection[int],
    waiting: Collection[int],
) -> str:
    """Return a letter for each rank, in order of rank: the letter of its worst state."""
    letters = [OTHER] * layout.world_size
    for letter, ranks in ((WAITING, waiting), (SILENT, silent), (OUTLIER, outliers), (SUSPECT, suspects)):
        for rank in ranks:
            if 0 <= rank < layout.world_size:
                letters[rank] = letter
    return "".join(letters)


def grid_lines(layout: Layout, letters: str) -> list[str]:
    """Return the lines of the drawing: a heading, then the replicas; equal neighbors share one line."""
    block, num_replicas = layout.stride("dp"), layout.dp_size
    starts = [layout.ranks_along(replica * block, STAGES) for replica in range(num_replicas)]
    rows = [[letters[start : start + block] for start in of_replica] for of_replica in starts]
    names: list[str] = []
    drawn: list[list[str]] = []
    first = 0
    for replica in range(1, num_replicas + 1):
        if replica < num_replicas and rows[replica] == rows[first]:
            continue
        names.append(f"dp {first}" if replica == first + 1 else f"dp {first}-{replica - 1}")
        drawn.append(rows[first])
        first = replica
    heads = [f"pp {stage}" for stage in range(layout.pp_size)]
    width, cell = max(map(len, names)), max(block, max(map(len, heads)))
    lines = [" " * width + "  " + "  ".join(head.ljust(cell) for head in heads).rstrip()]
    lines += [
        f"{name:<{width}}  " + "  ".join(c.ljust(cell) for c in row).rstrip()
        for name, row in zip(names, drawn, strict=True)
    ]
    return lines
