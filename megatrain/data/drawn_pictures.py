"""Pictures that this program draws, and their captions: data for demonstrations and tests, without files.

A picture shows one to four objects of one color and shape on a dark, noisy background. Its caption names their number,
color and shape: "two red circle". Everything follows from the seed and the number of the sample, through arithmetic
that does not change between versions of numpy. Training samples have numbers below NUM_PICTURES, so the pictures from
there on are unseen by every run; the first NUM_HELD_OUT of them are a validation set.
Shapes: N samples, P patches, C bytes of a patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.data.one_piece_order import OnePieceOrder
from megatrain.data.patches import Patches, patchify
from megatrain.data.permutation import key_of, mixed
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.remote_file import RemoteBlock
from megatrain.data.token_stream import Int64, SamplePieces
from megatrain.data.training_source import TrainingSource

COUNTS = ("one", "two", "three", "four")
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (220, 210, 40)}
SHAPES = ("circle", "square", "triangle")
WORDS = ("<end>", *COUNTS, *COLORS, *SHAPES)
"""The vocabulary; a token is an index. "<end>" begins and ends each caption."""
CAPTION_TOKENS = 5
"""<end>, number, color, shape, <end>."""
NUM_PICTURES = 1 << 31
NUM_HELD_OUT = 1024
GRID = 4
"""Objects lie in the cells of a grid of GRID * GRID; each cell has at most one."""
_DIGEST_PICTURES = 16
_BRIGHTEST_BACKGROUND, _NOISE, _SHIFT = 60, 24, 0.6


class Scene(NamedTuple):
    """What a picture shows. color and shape: indices of COLORS and SHAPES. key: the random details follow
    from it."""

    num_objects: int
    color: int
    shape: int
    key: np.uint64

    @property
    def caption(self) -> tuple[int, ...]:
        """The tokens of the caption."""
        words = (COUNTS[self.num_objects - 1], tuple(COLORS)[self.color], SHAPES[self.shape])
        return (0, *(WORDS.index(word) for word in words), 0)


def scene_of(seed: int, number: int) -> Scene:
    """Return what picture `number` shows: each number, color and shape is equally frequent."""
    key = key_of(seed, number)
    count, color, shape = _draws(key, 0, 3) % np.array([len(COUNTS), len(COLORS), len(SHAPES)], np.uint64)
    return Scene(int(count) + 1, int(color), int(shape), key)


def drawn(scene: Scene, size: int) -> Patches:
    """Return the picture of a scene. Shapes: result [size, size, 3]."""
    background, *cell_draws = _draws(scene.key, 3, 1 + GRID**2).tolist()
    noise = (_draws(scene.key, 32, size**2) % np.uint64(_NOISE)).astype(np.int64).reshape(size, size, 1)
    picture = np.broadcast_to(background % _BRIGHTEST_BACKGROUND, (size, size, 3)) + noise
    cells = sorted(range(GRID**2), key=cell_draws.__getitem__)[: scene.num_objects]
    places = _draws(scene.key, 20, 3 * scene.num_objects).reshape(-1, 3) % np.uint64(1 << 20) / (1 << 20)
    cell_size = size / GRID
    color = np.array(tuple(COLORS.values())[scene.color])
    for cell, (right, down, larger) in zip(cells, places.tolist(), strict=True):
        radius = cell_size * (0.34 + 0.1 * larger)
        row, column = divmod(cell, GRID)
        # the object stays in its cell and does not touch the cell's edge
        most_shift = _SHIFT * (cell_size / 2 - radius)
        center_y = (row + 0.5) * cell_size + (down * 2 - 1) * most_shift
        center_x = (column + 0.5) * cell_size + (right * 2 - 1) * most_shift
        y, x = np.mgrid[:size, :size] + 0.5
        is_inside = _is_inside(SHAPES[scene.shape], x - center_x, y - center_y, radius)
        picture = np.where(is_inside[:, :, None], color + noise // 2, picture)
    return picture.clip(0, 255).astype(np.uint8)


def _is_inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> NDArray[np.bool_]:
    """Return which points lie in a shape around (0, 0)."""
    if shape == "circle":
        return x**2 + y**2 <= radius**2
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= radius
    return (y <= radius) & (2 * abs(x) - radius <= y)


def _draws(key: np.uint64, first: int, count: int) -> NDArray[np.uint64]:
    """Return random words number `first` to `first + count` - 1 of a key."""
    return mixed(key ^ mixed(np.arange(first, first + count, dtype=np.uint64)))


@dataclass(frozen=True, slots=True)
class DrawnPictures:
    """The pictures of a run's samples: SamplePictures. is_held_out: whether they are those of the validation set."""

    format: PictureFormat
    seed: int
    is_held_out: bool = False

    @property
    def first(self) -> int:
        """The number of the picture of sample 0."""
        return NUM_PICTURES if self.is_held_out else 0

    @property
    def num_patches(self) -> int:
        return self.format.num_patches

    def patches(self, indices_N: Int64) -> Patches:
        """Return the pictures of these samples. Shapes: result [N, P, C]."""
        found = np.empty((len(indices_N), self.num_patches, self.format.patch_values), dtype=np.uint8)
        for place, number in enumerate(indices_N.tolist()):
            scene = scene_of(self.seed, self.first + number)
            found[place] = patchify(drawn(scene, self.format.size), self.format.patch)
        return found

    def digest(self) -> str:
        """Return a digest of the first pictures and captions, so that another way of drawing counts as other data."""
        numbers = np.arange(_DIGEST_PICTURES)
        digest = hashlib.sha256(self.patches(numbers).tobytes())
        captions = [scene_of(self.seed, self.first + number).caption for number in numbers.tolist()]
        digest.update(repr(captions).encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class DrawnCaptions:
    """The captions of drawn pictures end to end: a TokenStream. Each caption is a document. first: the number of the
    first picture."""

    seed: int
    first: int
    num_tokens: int
    cache_use: None = None

    def window(self, start: int, length: int) -> Int64:
        """Return tokens of the stream."""
        first, end = start // CAPTION_TOKENS, -(-(start + length) // CAPTION_TOKENS)
        numbers = range(self.first + first, self.first + end)
        captions = np.array([scene_of(self.seed, number).caption for number in numbers], dtype=np.int64)
        skipped = start - first * CAPTION_TOKENS
        return captions.ravel()[skipped : skipped + length]

    def document_starts_between(self, first: int, last: int) -> Int64:
        """Return where captions begin, from `first` to before `last`."""
        return np.arange(-(-first // CAPTION_TOKENS) * CAPTION_TOKENS, last, CAPTION_TOKENS, dtype=np.int64)

    def remote_blocks(self, start: int, length: int) -> Iterable[RemoteBlock]:
        """Return no blocks: captions are in no file."""
        return ()


@dataclass(frozen=True, slots=True)
class DrawnOrder(OnePieceOrder):
    """Sample n has caption n: a SourceOrder."""

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return the caption of each sample as its only piece."""
        starts = np.asarray(cursors, dtype=np.int64) % self.num_samples * CAPTION_TOKENS
        labels = np.full_like(starts, CAPTION_TOKENS - 1)
        return SamplePieces(starts, labels, np.arange(len(starts) + 1, dtype=np.int64))


def drawn_source(name: str, pictures: DrawnPictures, section: str = "") -> TrainingSource:
    """Return the source of drawn pictures and their captions. name, section: see StreamSource and TrainingSource."""
    num_pictures = NUM_HELD_OUT if pictures.is_held_out else NUM_PICTURES
    captions = DrawnCaptions(pictures.seed, pictures.first, num_pictures * CAPTION_TOKENS)
    identity = StreamSource(name, captions.num_tokens, pictures.digest())
    return TrainingSource(identity, captions, DrawnOrder(pictures.seed, num_pictures), section, pictures=pictures)
