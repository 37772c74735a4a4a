"""The pictures of samples, as the patches that the model embeds.

A picture is square, RGB, and cut into square patches: row by row in the picture, each patch row by row, each pixel red,
green, blue. Shapes: N samples, P patches, C bytes of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Patches = NDArray[np.uint8]


class SamplePictures(Protocol):
    """Pictures that belong to the samples of a source. They are found by number, so a source has no state."""

    @property
    def num_patches(self) -> int:
        """P, the same for all pictures."""

    def patches(self, indices_N: NDArray[np.int64]) -> Patches:
        """Return the pictures of these samples of the source. Shapes: result [N, P, C]."""


def pictures_of(
    pictures: Sequence[SamplePictures | None], sources_N: NDArray[np.int64], indices_N: NDArray[np.int64]
) -> dict[int, Patches]:
    """Return the picture of each sample that has one, by its place among the N samples. Shapes: each [P, C].

    pictures: of each source, None for a source without. sources_N, indices_N: the source of each sample, and its number
    in the source. Each source is asked once.
    """
    patches: dict[int, Patches] = {}
    for number, found in enumerate(pictures):
        places = np.flatnonzero(sources_N == number)
        if found is not None and len(places):
            patches |= zip(places.tolist(), found.patches(indices_N[places]), strict=True)
    return patches


def patchify(picture_HWC: Patches, patch_size: int) -> Patches:
    """Return the patches of a picture whose height and width `patch_size` divides. Shapes: [H, W, 3] -> [P, C]."""
    height, width, channels = picture_HWC.shape
    rows = picture_HWC.reshape(height // patch_size, patch_size, width // patch_size, patch_size, channels)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1, patch_size * patch_size * channels)
