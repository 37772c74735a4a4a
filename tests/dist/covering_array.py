"""Pairwise covering arrays: few rows in which every two levels of every two factors meet at least once.

Greedy, as AETG (Cohen et al., IEEE TSE 1997): a row starts from a pair that is still missing, the other factors take,
in random order, the level that covers most missing pairs, and the best of some such candidates becomes the row. The
random numbers are seeded, so the array is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

_CANDIDATES = 40


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every two levels, by index, of every two factors."""
    return {
        ((combination, i), (other, j))
        for combination, other in combinations(factors, 2)
        for i, j in product(range(len(factors[combination])), range(len(factors[other])))
    }


def covering_array(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Return rows of a level for each factor that cover all pairs."""
    generator = random.Random(seed)
    missing = all_pairs(factors)
    rows: list[Row] = []
    while missing:
        ordered = sorted(missing)
        candidates = [_candidate(factors, missing, generator.choice(ordered), generator) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda levels: len(_covered(factors, levels) & missing))
        missing -= _covered(factors, best)
        rows.append({name: factors[name][level] for name, level in best.items()})
    return rows


def _candidate(
    factors: Mapping[str, Sequence[Any]], missing: set[Pair], start: Pair, generator: random.Random
) -> dict[str, int]:
    levels = dict(start)
    others = [name for name in factors if name not in levels]
    generator.shuffle(others)
    order = list(factors)
    for name in others:
        before = [known for known in levels.items() if order.index(known[0]) < order.index(name)]
        after = [known for known in levels.items() if order.index(known[0]) > order.index(name)]
        own = [(name, level) for level in range(len(factors[name]))]
        gains = [
            sum((one, pair) in missing for one in before) + sum((pair, one) in missing for one in after) for pair in own
        ]
        levels[name] = generator.choice([level for level, gain in enumerate(gains) if gain == max(gains)])
    return levels


def _covered(factors: Mapping[str, Sequence[Any]], levels: Mapping[str, int]) -> set[Pair]:
    return set(combinations([(name, levels[name]) for name in factors], 2))
