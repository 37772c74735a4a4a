"""The error of a product in 8 bits.

The relative error of one rounding to 3 (2) bits is uniform up to 2^-4 (2^-3): 3.6 % (7.2 %) of root mean square for
numbers anywhere in their binade; two factors, summed over many terms of random sign, keep that ratio.
"""

from __future__ import annotations

from torch import Tensor

INPUT_ERROR, GRADIENT_ERROR = 0.036, 0.072


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the root mean square error of `found`, relative to that of `truth`, which is fp64."""
    return ((found.double() - truth).norm() / truth.norm()).item()
