"""Pictures in the ring of a host's data loader: the patches that each rank would read alone, and their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.config import Config
from megatrain.config.data import DataConfig
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.reader import BatchReader
from megatrain.training.training_data import open_reader, sample_stream
from tests.helpers.host_loading import content, filled_steps, new_ring, steps
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config

NUM_STEPS = 4
CONFIG = make_config(
    {
        "model": {"picture_size": 24, "patch_size": 12, "seq_len": 12, "encoder_num_layers": 1},
        "data": {"pictures": "drawn"},
    }
)
SHAPE = (4, 432)
"""[P, C] of a picture."""


def planned(layout: Layout, ranks: range, config: Config = CONFIG) -> tuple[BatchReader, LoaderPlan]:
    reader = open_reader(config)
    sequence = steps(layout, NUM_STEPS, least_slots=layout.pp_size)
    stream = sample_stream(config, reader, ())
    plan = loader_plan(reader, stream, sequence, layout, ranks, DataConfig(prefetch=1))
    return reader, LoaderPlan.from_json(plan.to_json().encode(), "plan")


@pytest.mark.parametrize(
    ("sizes", "ranks", "shape"),
    [
        ({"dp_size": 3}, range(3), SHAPE),
        # the empty micro-batches of a pipeline have no pictures
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, range(2, 6), SHAPE),
        ({"pp_size": 3, "dp_size": 2}, range(2, 6), (0, 0)),
    ],
)
def test_ranks_that_encode_get_patches_by_the_ring(sizes: dict[str, int], ranks: range, shape: tuple[int, int]) -> None:
    layout = Layout(**sizes)
    reader, plan = planned(layout, ranks)
    assert RingLayout.of(plan).picture_shape == shape
    assert_ranks_get_what_they_would_read(layout, ranks, reader, plan)


@pytest.mark.parametrize("balance", ["none", "cost"])
def test_pictures_beside_text_pass_the_ring(balance: str, tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text", 600, CONFIG.model.vocab_size)
    sources = {"data_source": {"path": str(text), "name": "web"}, "data_source-2": {"pictures": "drawn"}}
    model = {"picture_size": 24, "patch_size": 12, "seq_len": 12, "encoder_num_layers": 1}
    config = make_config({"model": model, "data": {"balance": balance}}, sources)
    layout, ranks = Layout(tp_size=2, pp_size=2, dp_size=3), range(2, 10)
    assert_ranks_get_what_they_would_read(layout, ranks, *planned(layout, ranks, config))


def assert_ranks_get_what_they_would_read(layout: Layout, ranks: range, reader: BatchReader, plan: LoaderPlan) -> None:
    """Let a loader of these ranks of a host fill its ring, step by step, and read it as they do."""
    ring, loader = new_ring(plan)
    for step, step_plan in filled_steps(plan, ring, loader):
        for place, rank in enumerate(ranks):
            encodes, is_end = (layout.index("pp", rank) in ends for ends in ([0], [0, layout.pp_size - 1]))
            found = ring.read(plan.share_of(place), step, step_plan, reader.source_names, has_patches=encodes)
            alone = reader.read_step(step_plan, layout.sample_share(rank)[0], has_patches=encodes)
            assert content(found, has_tokens=is_end) == content(alone, has_tokens=is_end)


def test_dry_run_counts_the_patches_of_the_ring() -> None:
    """A host without a rank of the first stage has none."""
    of_stages = CONFIG, Layout(pp_size=2)
    first, second = (RingLayout.of_host(*of_stages, ranks) for ranks in ([0], [1]))
    samples = first.depth * first.max_microbatches * first.micro_batch_size
    text = replace(first, picture_shape=(0, 0))
    assert (first.picture_shape, second.picture_shape) == (SHAPE, (0, 0))
    assert first.num_bytes - text.num_bytes == pytest.approx(samples * 4 * 432, abs=first.depth * 4096)


def test_loader_refuses_other_drawn_pictures_than_the_run() -> None:
    _, plan = planned(Layout(), range(1))
    (source,) = plan.stream.sources
    other = replace(plan, stream=replace(plan.stream, sources=(replace(source, digest="0" * 32),)))
    with pytest.raises(
        DataError, match=r"drawn pictures: has digest [0-9a-f]{32}, and had 0{32} when this round began"
    ):
        other.open_reader()
