"""Draws tokens one by one from a model, to show what it has learned.

Every token takes a forward pass over the whole context, which is simple and exact. Serving, with a key-value cache, is
out of scope. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0: the most likely token; top_k 0 and top_p 1: no tokens excluded.

    Raises: ConfigError naming every value that is out of range.
    """

    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [f"{name}={getattr(self, name)} must be at least 0" for name in ("max_tokens", "top_k")
                    if getattr(self, name) < 0]  # fmt: skip
        if not 0.0 <= self.temperature < math.inf:
            problems.append(f"temperature={self.temperature:g} must be a finite number of at least 0")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p={self.top_p:g} must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)


def draw_tokens(
    next_logits: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], end: int | None, sampling: Sampling
) -> Iterator[int]:
    """Yield the tokens after `prompt` one by one, until the token `end` or max_tokens.

    next_logits: returns the logits [V], on the CPU, of the token after those given.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        token = choose_token(next_logits(tokens), sampling, generator)
        if token == end:
            return
        tokens.append(token)
        yield token


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token id that is drawn by the rules of `sampling`. Shapes: logits [V]."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    scores_V = logits_V.double() / sampling.temperature
    if 0 < sampling.top_k < scores_V.numel():
        scores_V[scores_V < scores_V.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities_V = scores_V.softmax(0)
    if sampling.top_p < 1.0:
        sorted_V, order_V = probabilities_V.sort(descending=True)
        # keep the smallest set that reaches top_p: a token stays while the sum before it is below top_p
        sorted_V[sorted_V.cumsum(0) - sorted_V >= sampling.top_p] = 0.0
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
