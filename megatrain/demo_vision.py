"""`make demo DEMO_ARGS=--vision`: a small model with pictures, and its answers about pictures that it has not seen.

The model writes the caption of each unseen picture word by word. How often its words are right is compared with chance:
1 of 4 numbers, 1 of 4 colors, 1 of 3 shapes, each as frequent as the others.
Shapes: B pictures, P patches, S tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.run_files.run_directory import RunDirectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatrain.inference.loaded_model import LoadedModel

NUM_PROCESSES = 4
NUM_UNSEEN = 512
MARGIN = 0.5
"""The share of right answers must be this far above chance for each question."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The share of right words for each question, and the share of a model that guesses."""

    right: Mapping[str, float]
    chance: Mapping[str, float]

    @property
    def least_margin(self) -> float:
        return min(share - self.chance[question] for question, share in self.right.items())


def vision_arguments(config: Path, run: RunDirectory, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains."""
    command = ("megatrain", "launch", "--standalone", f"--nproc-per-node={NUM_PROCESSES}", str(config))
    return [*command, f"--job.run_directory={run.root}", *overrides]


def show_answers(checkpoint: Path, seconds: float) -> int:
    """Print some captions of unseen pictures and the shares of right words; return 0 if all are above chance by MARGIN.

    seconds: how long the training took.
    """
    import numpy as np

    from megatrain.data.drawn_pictures import NUM_PICTURES, WORDS, scene_of
    from megatrain.inference.loaded_model import load

    loaded, numbers = load(checkpoint, device="cpu"), NUM_PICTURES + np.arange(NUM_UNSEEN)
    found = captions_of(loaded, numbers)
    expected = np.array([scene_of(0, number).caption[1:-1] for number in numbers.tolist()])
    answers = answers_of(found, expected)
    print(f"\n== trained in {seconds:.0f} s; captions of pictures that no run trains on")
    for words, right in zip(found[:8].tolist(), expected[:8].tolist(), strict=True):
        texts = [" ".join(WORDS[token] for token in tokens) for tokens in (words, right)]
        print(f"  {texts[0]:24} {'right' if words == right else f'wrong: {texts[1]}'}")
    for question, share in answers.right.items():
        print(f"{question:8} {share:6.1%} right   chance {answers.chance[question]:6.1%}")
    print(f"checkpoint {checkpoint}")
    least = answers.least_margin
    print(f"the answers are at least {least:.1%} above chance ({MARGIN:.0%} expected)")
    if least < MARGIN:
        print("demo: the model has not learned enough; use more steps (-- --train.steps=...)", file=sys.stderr)
        return 1
    return 0


def captions_of(loaded: LoadedModel, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the words that the model writes about drawn pictures, without the ends. Shapes: result [B, 3]."""
    import numpy as np
    import torch

    from megatrain.data.drawn_pictures import CAPTION_TOKENS, DrawnPictures
    from megatrain.data.pictures.picture_format import PictureFormat

    model = loaded.config
    pictures = DrawnPictures(PictureFormat(model.picture_size, model.patch_size), 0)
    patches_BPC = torch.from_numpy(pictures.patches(numbers))
    tokens_BS = torch.zeros((len(numbers), model.num_patches + 1), dtype=torch.int64)  # <end> begins a caption
    for _ in range(CAPTION_TOKENS - 2):
        next_B = loaded.logits(tokens_BS, patches_BPC)[:, -1].argmax(-1).cpu()
        tokens_BS = torch.cat([tokens_BS, next_B[:, None]], dim=1)
    return np.asarray(tokens_BS[:, model.num_patches + 1 :])


def answers_of(found: NDArray[np.int64], expected: NDArray[np.int64]) -> Answers:
    """Compare words with the captions. Shapes: both [B, 3]."""
    from megatrain.data.drawn_pictures import COLORS, COUNTS, SHAPES

    sizes = {"number": len(COUNTS), "color": len(COLORS), "shape": len(SHAPES)}
    right = (found == expected).mean(0).tolist()
    return Answers(dict(zip(sizes, right, strict=True)), {question: 1 / size for question, size in sizes.items()})
