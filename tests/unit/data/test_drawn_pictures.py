"""Drawn pictures: what they show against their captions, their statistics, and the micro-batches that carry them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.contracts.errors import DataError
from megatrain.data.drawn_pictures import (
    CAPTION_TOKENS,
    COLORS,
    COUNTS,
    NUM_HELD_OUT,
    NUM_PICTURES,
    SHAPES,
    WORDS,
    DrawnPictures,
    drawn,
    scene_of,
)
from megatrain.data.held_out import evaluation_batches
from megatrain.data.patches import Patches, patchify
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.training.batch_notes import length_notes
from megatrain.training.training_data import open_reader, open_validation
from tests.helpers.read_samples import by_sample, read_configured
from tests.helpers.training_case import make_config

SIZE, PATCH = 48, 12
PICTURES = {
    "model": {"picture_size": SIZE, "patch_size": PATCH, "seq_len": 24, "encoder_num_layers": 1},
    "data": {"pictures": "drawn", "seed": 5},
}
NUMBERS = (0, 1, 17, NUM_PICTURES - 1, NUM_PICTURES + 3)


def objects_in(picture: Patches) -> list[tuple[Patches, NDArray[np.bool_]]]:
    """Return each connected bright area of a picture: the colors of its pixels, and its mask in its bounding box."""
    is_bright = picture.max(-1) > 120
    labels = np.where(is_bright, np.arange(1, is_bright.size + 1).reshape(is_bright.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        neighbors = (padded[2:, 1:-1], padded[:-2, 1:-1], padded[1:-1, 2:], padded[1:-1, :-2], labels)
        spread = np.where(is_bright, np.max(neighbors, axis=0), 0)
        if (spread == labels).all():
            break
        labels = spread
    masks = [labels == label for label in np.unique(labels[is_bright])]
    return [(picture[mask], mask[np.ix_(mask.any(1), mask.any(0))]) for mask in masks]


def test_pictures_show_what_their_captions_say() -> None:
    """A square fills its bounding box, a disc pi / 4 of it, a triangle half."""
    share_of = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}
    for number in range(60):
        scene = scene_of(5, number)
        objects = objects_in(drawn(scene, 96))
        pixels = objects[0][0]
        distances = {name: np.abs(np.array(known) - pixels.mean(0)).sum() for name, known in COLORS.items()}
        share = np.mean([mask.mean() for _, mask in objects])
        words = [WORDS[token] for token in scene.caption]

        assert words == [
            "<end>",
            COUNTS[len(objects) - 1],
            min(distances, key=lambda name: distances[name]),
            min(SHAPES, key=lambda name: abs(share_of[name] - share)),
            "<end>",
        ], (number, share)


def test_scenes_are_equally_frequent_and_differ_by_seed() -> None:
    scenes = [scene_of(5, number) for number in range(4800)]
    counted = Counter(scene[:3] for scene in scenes)

    assert len(counted) == len(COUNTS) * len(COLORS) * len(SHAPES) == 48
    # 100 of each on average, with a deviation of 10
    assert 60 < min(counted.values()) <= max(counted.values()) < 140
    assert [scene_of(6, number)[:3] for number in range(30)] != [scene[:3] for scene in scenes[:30]]
    assert len({scene.key for scene in scenes}) == len(scenes)


def test_pictures_are_the_same_on_every_machine() -> None:
    """Another digest means other data: a run could not be resumed, and stored results would not be comparable."""
    assert DrawnPictures(PictureFormat(32, 8), 7).digest() == "cde3348aad5e895c6f416efb17c77a6b"


def test_patches_cut_the_picture_row_by_row() -> None:
    picture = drawn(scene_of(5, 3), SIZE)
    patches = patchify(picture, PATCH)

    assert patches.shape == (16, PATCH * PATCH * 3)
    for number in range(16):
        row, column = divmod(number, 4)
        part = picture[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        assert (patches[number] == part.ravel()).all(), number


def test_samples_are_the_same_for_any_number_of_replicas() -> None:
    configs = [
        make_config(PICTURES, {"parallel": {"dp_size": dp_size}, "batch": {"micro_batch_size": 2}})
        for dp_size in (1, 2, 4)
    ]
    by_dp = [by_sample(read_configured(config, 3)) for config in configs]

    assert list(by_dp[0]) == list(range(24, 32))
    assert all(patches for _, _, patches in by_dp[0].values())
    assert by_dp[0] == by_dp[1] == by_dp[2]


def test_rows_of_the_picture_come_first_and_have_no_loss() -> None:
    config = make_config(PICTURES, {"data": PICTURES["data"] | {"has_document_mask": True}})
    (part,) = read_configured(config)
    assert part.num_pictures == 8
    for micro in part.microbatches:
        assert micro.patches_PKC is not None
        assert micro.document_SB is not None
        number = int(micro.sample_B[0])
        caption = scene_of(5, number).caption
        num_labels = CAPTION_TOKENS - 1
        assert micro.tokens_SB[:, 0].tolist() == [0] * 16 + list(caption[:-1]) + [0] * 4
        assert micro.labels_SB[:, 0].tolist() == [-100] * 16 + list(caption[1:]) + [-100] * 4
        assert micro.document_SB[:, 0].tolist() == [0] * 20 + [1] * 4
        assert micro.num_labels_B.tolist() == [num_labels]
        assert micro.picture_place_K is not None
        assert micro.picture_place_K.tolist() == [0]
        assert (micro.patches_PKC[:, 0] == patchify(drawn(scene_of(5, number), SIZE), PATCH)).all()


def test_held_out_pictures_are_those_that_no_run_trains_on() -> None:
    config = make_config(PICTURES, {"validation_set": {"pictures": "drawn"}})
    (held_out,) = open_validation(config)
    assert (held_out.name, held_out.num_samples) == ("drawn pictures", NUM_HELD_OUT)
    (training,) = open_reader(config).sources
    assert training is not None
    assert held_out.digest != training.identity.digest

    parts = list(evaluation_batches(held_out.reader, 3, 2, 0, 1))
    assert [micro.sample_B.tolist() for part in parts for micro in part.microbatches] == [[0, 1], [2, -1]]
    for sample, micro in enumerate(micro for part in parts for micro in part.microbatches for _ in range(2)):
        place, scene = sample % 2, scene_of(5, NUM_PICTURES + sample)
        if sample == 3:
            assert micro.num_labels_B[place] == 0
            continue
        assert micro.labels_SB[:, place].tolist() == [-100] * 16 + list(scene.caption[1:]) + [-100] * 4
        assert micro.patches_PKC is not None
        assert (micro.patches_PKC[:, place] == patchify(drawn(scene, SIZE), PATCH)).all()
    another = make_config(PICTURES, {"validation_set": {"pictures": "drawn"}, "evaluation": {"num_samples": 5}})
    assert [one.num_samples for one in open_validation(another)] == [5]


def test_length_change_adds_padding_only() -> None:
    lengths = {"data": PICTURES["data"] | {"seq_len": 20}, "data_stage": {"after_tokens": 8 * 20, "seq_len": 24}}
    config = make_config(PICTURES, lengths)
    (note,) = length_notes(config, open_reader(config), TrainingProgress(), ())
    assert "from step 2 on, samples have 24 tokens: at sample 8, after 160 tokens" in note
    assert "; 0 of them are assembled from windows of the previous length" in note

    changed, whole = (by_sample(read_configured(one, 1)) for one in (config, make_config(PICTURES)))
    assert list(changed) == list(range(8, 16))
    assert changed == whole


def test_patches_are_read_for_the_first_stage_alone() -> None:
    uneven = make_config(PICTURES, {"parallel": {"dp_size": 3, "zero_stage": 2}})
    last = read_configured(uneven)[2].microbatches[-1]
    (without,) = read_configured(make_config(PICTURES), has_patches=False)

    assert last.sample_B.tolist() == [-1]
    assert last.patches_PKC is None
    assert all(micro.patches_PKC is None for micro in without.microbatches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 11}, r"captions have 12 words, more than model\.vocab_size=11; set model\.vocab_size=12"),
        ({"seq_len": 19}, r"16 patches leave 3 tokens of a sample for the caption, which needs 4"),
    ],
)
def test_model_without_room_for_captions_is_refused(changes: dict[str, int], message: str) -> None:
    config = make_config(PICTURES, {"model": PICTURES["model"] | changes})

    with pytest.raises(DataError, match=message):
        open_reader(config)
