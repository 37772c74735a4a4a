"""Pairwise covering arrays: few rows in which every two levels of every two factors occur together at least once.

The algorithm is greedy, as AETG (Cohen et al., IEEE TSE 1997): a row starts from a pair that is not covered yet, the
other factors take, in random order, the level that covers most of the missing pairs, and the best of several such
candidates becomes the row. The random numbers are seeded, so the array is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Level = tuple[str, int]
Pair = tuple[Level, Level]

_CANDIDATES = 40


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return every two levels, by index, of every two factors."""
    return {
        ((combination, i), (other, j))
        for combination, other in combinations(factors, 2)
        for i, j in product(range(len(factors[combination])), range(len(factors[other])))
    }


def covering_array(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Return rows with one level for each factor that cover all pairs."""
    generator = random.Random(seed)
    missing = all_pairs(factors)
    bit_of = {(name, level): 1 << bit for bit, (name, level) in enumerate(_levels(factors))}
    rows: list[Row] = []
    while missing:
        ordered = sorted(missing)
        # Each process that imports a test with such rows computes them, so levels are bits for speed.
        partners = dict.fromkeys(bit_of, 0)
        for one, other in missing:
            partners[one] |= bit_of[other]
            partners[other] |= bit_of[one]
        candidates = [
            _candidate(factors, partners, bit_of, generator.choice(ordered), generator) for _ in range(_CANDIDATES)
        ]
        best = max(candidates, key=lambda levels: len(_covered(factors, levels) & missing))
        missing -= _covered(factors, best)
        rows.append({name: factors[name][level] for name, level in best.items()})
    return rows


def _candidate(
    factors: Mapping[str, Sequence[Any]],
    partners: Mapping[Level, int],
    bit_of: Mapping[Level, int],
    start: Pair,
    generator: random.Random,
) -> dict[str, int]:
    """partners: for each level, the bits of the levels that it has not been paired with yet."""
    levels = dict(start)
    chosen = bit_of[start[0]] | bit_of[start[1]]
    others = [name for name in factors if name not in levels]
    generator.shuffle(others)
    for name in others:
        gains = [(partners[name, level] & chosen).bit_count() for level in range(len(factors[name]))]
        most = max(gains)
        levels[name] = generator.choice([level for level, gain in enumerate(gains) if gain == most])
        chosen |= bit_of[name, levels[name]]
    return levels


def _levels(factors: Mapping[str, Sequence[Any]]) -> list[Level]:
    return [(name, level) for name, all_levels in factors.items() for level in range(len(all_levels))]


def _covered(factors: Mapping[str, Sequence[Any]], levels: Mapping[str, int]) -> set[Pair]:
    return set(combinations([(name, levels[name]) for name in factors], 2))
