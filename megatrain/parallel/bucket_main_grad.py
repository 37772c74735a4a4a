"""The main_grad of a parameter whose gradient lies in a bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.ops.main_grad import Addition, set_main_grad
from megatrain.parallel.deferred_wgrads import Wgrads


@dataclass(frozen=True, slots=True, weakref_slot=True)
class BucketMainGrad:
    """The main_grad of one parameter. write: calls an Addition with the gradient's memory in the bucket."""

    write: Callable[[Addition], None]
    wgrads: Wgrads

    def add(self, add: Addition) -> None:
        self.write(add)

    def add_wgrad(self, add: Addition) -> None:
        self.wgrads.run(lambda: self.write(add))

    def add_grad(self, parameter: Tensor) -> None:
        """Move the gradient that autograd left in `parameter.grad`, if any, to the bucket."""
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.write(lambda total, is_fresh: total.copy_(gradient) if is_fresh else total.add_(gradient))


def add_gradients_to(main_grad: BucketMainGrad, parameter: nn.Parameter) -> None:
    """Make all operations add the gradients of `parameter` to `main_grad`, also those that return them to autograd.

    The garbage collector does not traverse torch's hooks. A hook with a strong reference to its bucket, and so to the
    parameter, would keep the whole model and its groups alive forever.
    """
    set_main_grad(parameter, main_grad)
    reference = weakref.ref(main_grad)

    def add_grad(parameter: Tensor) -> None:
        found = reference()
        if found is not None:  # otherwise the parameter has another main_grad by now
            found.add_grad(parameter)

    parameter.register_post_accumulate_grad_hook(add_grad)
