"""What a picture becomes: the size of the square, the size of its patches, and which pictures are refused.

Loads no numpy, because the command line needs these names and limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.errors import DataError

CPU, MIXED = "cpu", "mixed"
DEVICES = (CPU, MIXED)
"""Where DALI decodes. `mixed`: on a GPU, as far as it can decode the format."""
DALI, DALI_MIXED, PILLOW = "dali", "dali-mixed", "pillow"
DECODERS = (DALI, DALI_MIXED, PILLOW)
"""What a producer decodes with: DALI on the CPU or on a GPU, or Pillow."""
REFUSE, REPLACE = "refuse", "replace"
BAD_PICTURES = (REFUSE, REPLACE)
"""What happens to a picture that cannot be used: it is an error, or it is replaced by zeros without a caption."""
MAX_PIXELS = 1 << 26
CHANNELS = 3
MAX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """size: pixels of a side of the square to which each picture is resized as a whole. patch: pixels of a side of a
    patch. max_pixels: pictures with more pixels are refused by their headers, before memory is allocated for them.

    Raises: DataError naming a value that is not possible.
    """

    size: int
    patch: int
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if not 1 <= self.patch <= self.size <= MAX_SIZE or self.size % self.patch:
            raise DataError(
                f"pictures of size={self.size} cannot be cut into patches of patch={self.patch}: size must be a "
                f"multiple of patch, and at most {MAX_SIZE}"
            )
        if self.max_pixels < 1:
            raise DataError(f"max_pixels={self.max_pixels} must be at least 1")

    @property
    def num_patches(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def patch_values(self) -> int:
        """The values of one patch."""
        return self.patch * self.patch * CHANNELS

    @property
    def num_bytes(self) -> int:
        """The bytes of the patches of one picture."""
        return self.num_patches * self.patch_values
