"""Keep a cheap recipe instead of a tensor that backward needs.

Autograd saves the input of every product. Some of these inputs are quickly had again: a gathered sequence from this
rank's rows, a norm's output from its input, an activation from what it was applied to. While a chunk runs inside a
Rematerializer, such an output is registered with its recipe; when autograd saves it (or a view of it), the recipe is
stored in its place and carried out in backward, once for all its uses.
Source: ours, on torch's saved_tensors_hooks; the idea of re-gathering in backward from Korthikanti et al. (2205.05198).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class _Recipe:
    load_source: Callable[[], Tensor]
    recompute: Callable[[Tensor], Tensor]
    num_uses: int = 0
    output: Tensor | None = None

    def take(self) -> Tensor:
        """Return the output, computed at the first use and dropped at the last."""
        if self.output is None:
            with torch.no_grad():
                self.output = self.recompute(self.load_source())
        output = self.output
        self.num_uses -= 1
        if self.num_uses == 0:
            self.output = None
        return output


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a recipe's output, as autograd wanted to save it."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Keeper(Protocol):
    """Holds the tensors that have no recipe."""

    def keep(self, x: Tensor) -> Any:
        """Return what to hold in place of the saved tensor x."""

    def load(self, kept: Any) -> Tensor:
        """Return the saved tensor again."""


class _InPlace:
    """Holds a tensor where it is."""

    def keep(self, x: Tensor) -> Tensor:
        return x.detach()  # x itself may be the output of what saves it: a cycle that nothing would ever free

    def load(self, kept: Tensor) -> Tensor:
        return kept


class Rematerializer:
    """A context in which registered outputs are saved as recipes, and everything else is left to its keeper.

    An output is known by its storage object, which torch keeps for as long as any tensor lives in that memory: so the
    recipe goes with the output, and none is mistaken for another, on devices without memory (meta) either.
    """

    def __init__(self) -> None:
        self.keeper: Keeper = _InPlace()
        self._recipes: weakref.WeakKeyDictionary[torch.UntypedStorage, _Recipe] = weakref.WeakKeyDictionary()
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> Rematerializer:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._load)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)

    def register(self, output: Tensor, source: Tensor, recompute: Callable[[Tensor], Tensor]) -> None:
        """Say that `recompute(source)` gives `output` again. `source` may be a registered output itself."""
        if torch.is_grad_enabled() and self._hooks:
            kept = self._save(source.detach())
            self._recipes[output.untyped_storage()] = _Recipe(lambda: self._load(kept), recompute)

    def _save(self, x: Tensor) -> Any:
        recipe = self._recipes.get(x.untyped_storage())
        if recipe is None:
            return self.keeper.keep(x)
        recipe.num_uses += 1
        return _Saved(recipe, x.size(), x.stride(), x.storage_offset())

    def _load(self, saved: Any) -> Tensor:
        if isinstance(saved, _Saved):
            return saved.recipe.take().as_strided(saved.size, saved.stride, saved.offset)
        return self.keeper.load(saved)
