"""The configurations of the repository: each is valid with its world size, and has the published shape."""

from __future__ import annotations

import pytest

from megatrain.config import Config, load_config, num_parameters
from tests.helpers.source_tree import ROOT

WORLD_SIZES = {
    "demo": 8,
    "demo_vision": 4,
    "gpt_125m": 1,
    "llama3_8b": 64,
    "qwen3_8b": 64,
    "gemma3_4b": 64,
    "olmo2_7b": 64,
    "megascale_175b": 12288,
    "megascale_530b": 11200,
}


def config_of(name: str, world_size: int | None = None) -> Config:
    return load_config(ROOT / "configs" / f"{name}.toml", world_size=world_size).config


def test_every_file_is_listed_here() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.toml")} == set(WORLD_SIZES)


def test_every_file_passes_with_its_world_size() -> None:
    for name, world_size in WORLD_SIZES.items():
        assert config_of(name, world_size).layout(world_size).world_size == world_size, name


def test_demo_uses_every_axis() -> None:
    parallel = config_of("demo").parallel
    assert (parallel.tp_size, parallel.pp_size, parallel.dp_size, parallel.num_chunks) == (2, 2, 2, 2)
    assert parallel.schedule == "interleaved"


@pytest.mark.parametrize(
    ("name", "heads_hidden_layers", "tp_pp_chunks", "dp_size", "global_batch_size", "billions"),
    [
        ("megascale_175b", (128, 12288, 96), (8, 8, 6), 192, 6144, 175),
        ("megascale_530b", (160, 20480, 105), (8, 35, 3), 40, 11200, 530),
    ],
)
def test_shapes_that_the_paper_prints(
    name: str,
    heads_hidden_layers: tuple[int, int, int],
    tp_pp_chunks: tuple[int, int, int],
    dp_size: int,
    global_batch_size: int,
    billions: int,
) -> None:
    config = config_of(name)
    model, parallel = config.model, config.parallel

    assert (model.num_heads, model.hidden_size, model.num_layers) == heads_hidden_layers
    assert (parallel.tp_size, parallel.pp_size, parallel.num_chunks) == tp_pp_chunks
    assert (model.seq_len, model.vocab_size) == (2048, 64000)
    assert (parallel.dp_size, config.batch.global_batch_size) == (dp_size, global_batch_size)
    assert (model.block, config.optimizer.name) == ("parallel", "lamb")
    assert 0 < model.window_size < model.seq_len
    assert num_parameters(model) == pytest.approx(billions * 1e9, rel=0.005)


def test_files_have_the_published_numbers_of_parameters() -> None:
    assert num_parameters(config_of("llama3_8b").model) == 8_030_261_248
    assert num_parameters(config_of("qwen3_8b").model) == 8_190_735_360
    assert num_parameters(config_of("gemma3_4b").model) == 3_880_099_328
    assert num_parameters(config_of("olmo2_7b").model) == 7_298_617_344
    assert num_parameters(config_of("gpt_125m").model) == 124_475_904  # GPT-2 small and 47 rows of padding
