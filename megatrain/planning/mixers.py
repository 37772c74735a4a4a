"""The memory of the mixers: what attention and the MLP keep, and what is alive while they run.

Follows megatrain/model/attention.py and mlp.py line by line: a tensor is held from the line that makes it to the line
after which nothing refers to it, whether its own name or a view of it. A weight's gradient is none: its product adds to
the sum in the bucket. Its factors are the projection's input and the gradient of its output.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.model import ModelConfig
from megatrain.planning.footprint import Ledger
from megatrain.planning.tensor_bytes import TensorBytes


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Causal self-attention with its two projections."""

    model: ModelConfig
    sizes: TensorBytes

    @property
    def kept(self) -> int:
        """What the kernel saves: its output, and heads that are views of the product, or tensors of their own."""
        return self._heads + self.sizes.query + self.sizes.lse

    def forward(self, ledger: Ledger) -> None:
        """Leave what is kept and the output alive."""
        sizes = self.sizes
        ledger.visit(sizes.qkv, sizes.fp8_forward(sizes.hidden, sizes.qkv))
        ledger.hold(sizes.qkv)
        self.attend(ledger)
        ledger.visit(sizes.hidden, sizes.fp8_forward(sizes.query, sizes.hidden))
        ledger.hold(sizes.hidden)

    def attend(self, ledger: Ledger) -> None:
        """Go from the first product, which is held, to what the second is made of."""
        if self._is_split:
            ledger.hold(self._heads)
            ledger.release(self.sizes.qkv)
        else:
            ledger.hold(self._heads - self.sizes.qkv)
        ledger.hold(self.sizes.query, self.sizes.lse)

    def attend_backward(self, ledger: Ledger) -> None:
        """Go the same way back with the gradient, letting go of what is kept."""
        sizes = self.sizes
        ledger.hold(sizes.query + 2 * sizes.key)
        ledger.release(self.kept - sizes.query, sizes.query)
        ledger.release_factors(sizes.query)
        ledger.hold(sizes.qkv)  # the three parts are put together
        ledger.release(sizes.query + 2 * sizes.key)

    def backward(self, ledger: Ledger, gradient: int, inner: int) -> None:
        """Go from the output's gradient, of which `gradient` bytes die here, to the input's.

        inner: bytes that come to life for the product with the input and stay.
        """
        sizes = self.sizes
        ledger.visit(sizes.query, sizes.fp8_backward(sizes.query, sizes.hidden))
        ledger.hold_factor(sizes.fp8_put_off(sizes.hidden))
        ledger.hold(sizes.query)
        ledger.release_factors(gradient)
        self.attend_backward(ledger)
        ledger.visit(inner, sizes.hidden, sizes.fp8_backward(sizes.hidden, sizes.qkv))
        ledger.hold_factor(sizes.fp8_put_off(sizes.qkv))
        ledger.hold(inner, sizes.hidden)
        ledger.release_factors(sizes.qkv)

    @property
    def _is_split(self) -> bool:
        """Whether heads that cannot stay where they are, are moved while they are turned."""
        return self.sizes.is_query_copied and self.model.positions == "rope"

    @property
    def _heads(self) -> int:
        """Queries, keys and values. Without rotary positions, a copy of the queries beside the product they are in."""
        sizes = self.sizes
        return sizes.qkv + (sizes.query if sizes.is_query_copied and not self._is_split else 0)


@dataclass(frozen=True, slots=True)
class MlpMemory:
    """Widening product, activation function, narrowing product. is_selective: the function is run again in backward."""

    model: ModelConfig
    sizes: TensorBytes
    is_selective: bool

    @property
    def kept(self) -> int:
        return self.sizes.up + (0 if self.is_selective else self.sizes.activation)

    def forward(self, ledger: Ledger) -> None:
        """Leave what is kept and the output alive.

        Where the activation function is run again, its result stays for now: it is known by its address.
        """
        sizes = self.sizes
        ledger.visit(sizes.up, sizes.fp8_forward(sizes.hidden, sizes.up))
        ledger.hold(sizes.up, sizes.activation)
        ledger.visit(sizes.hidden, sizes.fp8_forward(sizes.activation, sizes.hidden))
        ledger.hold(sizes.hidden)

    def backward(self, ledger: Ledger, gradient: int, inner: int) -> None:
        """As AttentionMemory.backward."""
        sizes = self.sizes
        if self.is_selective:
            ledger.hold(sizes.activation)
        ledger.visit(sizes.activation, sizes.fp8_backward(sizes.activation, sizes.hidden))
        ledger.hold_factor(sizes.fp8_put_off(sizes.hidden))
        ledger.hold(sizes.activation)
        ledger.release_factors(sizes.activation, gradient)
        ledger.hold(sizes.up)
        ledger.release(sizes.up, sizes.activation)
        ledger.visit(inner, sizes.hidden, sizes.fp8_backward(sizes.hidden, sizes.up))
        ledger.hold_factor(sizes.fp8_put_off(sizes.up))
        ledger.hold(inner, sizes.hidden)
        ledger.release_factors(sizes.up)
