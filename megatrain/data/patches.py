"""The pictures of samples, as the patches that the model embeds.

A picture is square, RGB, and cut into square patches: row by row in the picture, each patch row by row, each pixel red,
green, blue. Shapes: N samples, P patches, C bytes of a patch. This package loads no torch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Patches = NDArray[np.uint8]


class SamplePictures(Protocol):
    """Pictures that belong to the samples of a source. They are found by number, so a source has no state."""

    @property
    def num_patches(self) -> int:
        """P, the same for all pictures."""

    @property
    def patch_width(self) -> int:
        """C."""

    def patches(self, indices_N: NDArray[np.int64]) -> Patches:
        """Return the pictures of these samples of the source. Shapes: result [N, P, C]."""


def patchify(picture_HWC: Patches, patch_size: int) -> Patches:
    """Return the patches of a picture whose height and width `patch_size` divides. Shapes: [H, W, 3] -> [P, C]."""
    height, width, channels = picture_HWC.shape
    rows = picture_HWC.reshape(height // patch_size, patch_size, width // patch_size, patch_size, channels)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1, patch_size * patch_size * channels)
