"""The generated reference is complete, every key is used, and the configurations of the repository are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.model_size import num_parameters
from megatrain.config.reference import reference_markdown
from megatrain.config.sections import all_options
from tests.helpers.source_tree import ROOT
from tests.unit.config.conftest import ProblemsOf

OPTIONS = {f"{section}.{name}": option for section, keys in all_options().items() for name, option in keys.items()}


def test_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text() == reference_markdown(), f"write it again: megatrain config reference --output {page}"


def test_every_key_has_a_row_below_its_section() -> None:
    rows = []
    section = ""
    for line in reference_markdown().splitlines():
        if line.startswith("## ["):
            section = line[4:-1]
        elif line.startswith("| `"):
            rows.append(f"{section}.{line.split('`')[1]}")
    assert rows == list(OPTIONS)


def test_documentation_is_a_sentence_and_the_default_is_allowed() -> None:
    for key, option in OPTIONS.items():
        assert option.doc.endswith("."), key
        if option.default is not None:
            assert option.parse(option.default) == option.default, key
            assert option.violation(option.default) is None, key
        assert option.violation(option.placeholder) is None, key
        assert option.name.endswith("_s") == (option.unit == "s"), key
        assert option.choices or option.kind not in ("int", "list of int") or option.minimum is not None, key


def test_row_shows_type_default_unit_and_choices() -> None:
    page = reference_markdown()
    assert "| `lr` | float | required |  | > 0 and <= 1000 | Highest learning rate, reached after warm-up. |" in page
    assert '| `schedule` | choice | `"1f1b"` |  | "gpipe", "1f1b", "interleaved" or "zero_bubble" | ' in page
    assert "| `step_timeout_s` | float | `120.0` | s | > 0 and <= 1000000000 | " in page


def test_values_of_a_run_stand_beside_the_defaults(small: Path) -> None:
    loaded = load_config(small, ["--parallel.overlap=false", "--job.name=a"])
    lines = reference_markdown(loaded).splitlines()
    cells = {tuple(line.split(" | ")[:4]) for line in lines if line.startswith("| `")}

    assert lines.count("| key | type | default | Value here | unit | allowed | meaning |") == len(all_options())
    assert {line.count(" | ") for line in lines if line.startswith("| `")} == {6}
    assert ("| `num_heads`", "int", "required", "**`20`**") in cells
    assert ("| `overlap`", "bool", "`true`", "**`false`**") in cells
    assert ("| `name`", "str", '`"megatrain"`', '**`"a"`**') in cells
    assert ("| `dropout`", "float", "`0.0`", "`0.0`") in cells


def test_training_needs_data(problems_of: ProblemsOf) -> None:
    expected = (
        'data.train="" must name the training tokens; set it to the path of a .bin and .idx pair without the suffix '
        "(`megatrain data build` makes one), or name several with [[data_source]] (default)"
    )

    assert problems_of(is_for_training=True) == (expected,)
    assert problems_of("--data.train=tokens", is_for_training=True) == ()


def test_configuration_from_a_program_is_checked_without_places(small: Path) -> None:
    loaded = load_config(small)
    tables = loaded.config.to_dict()
    tables["parallel"]["tp_size"] = 0
    tables["model"]["window_size"] = 100

    assert check(loaded.config, {}, world_size=1) == []
    assert check(type(loaded.config).from_dict(tables), {}, world_size=1) == [
        "parallel.tp_size=0 is out of range; use a value >= 1 and <= 10000000",
        "model.window_size=100 must be at most model.seq_len=64; use 64 or less, or 0 for no window",
    ]


WORLD_SIZES = {
    "demo": 8, "demo_vision": 4, "gpt_125m": 1, "llama3_8b": 64, "qwen3_8b": 64, "gemma3_4b": 64, "olmo2_7b": 64,
    "megascale_175b": 12288, "megascale_530b": 11200,
}  # fmt: skip


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
