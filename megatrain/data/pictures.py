"""The pictures of samples, as the patches that the model embeds.

A picture is square, RGB, and cut into square patches: row by row in the picture, each patch row by row, each pixel red,
green, blue. Shapes: N samples, P patches, C bytes of a patch. This package loads no torch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Patches = NDArray[np.uint8]


class PictureSource(Protocol):
    """Pictures that belong to the samples of a source. They are found by number, so a source has no state."""

    @property
    def num_patches(self) -> int:
        """P, the same for all pictures."""

    @property
    def patch_width(self) -> int:
        """C."""

    def patches(self, indices_N: NDArray[np.int64]) -> Patches:
        """Return the pictures of these samples of the source. Shapes: result [N, P, C]."""


def patches_of(picture: Patches, patch_size: int) -> Patches:
    """Return the patches of a picture whose width `patch_size` divides. Shapes: [size, size, 3] -> [P, C]."""
    num_rows = len(picture) // patch_size
    cut = picture.reshape(num_rows, patch_size, num_rows, patch_size, -1).swapaxes(1, 2)
    return cut.reshape(num_rows**2, -1)
