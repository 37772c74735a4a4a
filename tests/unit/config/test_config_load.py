"""Reading a file: places, suggestions, all problems at once, and no problem reported twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from megatrain.config.load import load_config
from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import ConfigError
from tests.unit.config.conftest import ProblemsOf

_KEYS = [field.name for field in fields(ModelConfig)]
MODEL_KEYS = f"{', '.join(_KEYS[:-1])} or {_KEYS[-1]}"


def test_values_come_with_their_origins(small: Path) -> None:
    loaded = load_config(small, ["--train.steps=7", "--optimizer.lr", "2"])

    assert (loaded.config.model.num_heads, loaded.config.train.steps, loaded.config.optimizer.lr) == (20, 7, 2.0)
    assert [str(loaded.origins[key]) for key in ("model.num_heads", "train.steps", "parallel.tp_size")] == [
        "small.toml:6",
        "--train.steps on the command line",
        "default",
    ]


def test_every_key_has_an_origin(small: Path) -> None:
    loaded = load_config(small)
    keys = [f"{section}.{name}" for section, values in loaded.config.to_dict().items() for name in values]
    assert list(loaded.origins) == keys


# The replacement in the valid file, and the whole text of the single resulting message.
MISTAKES = {
    "misspelled key": (
        "num_heads = 20", "num_head = 20",
        "model.num_head=20 is not a known key; did you mean model.num_heads? (small.toml:6)",
    ),
    "key of another section": (
        "num_heads = 20", "num_heads = 20\ntp_size = 3",
        "model.tp_size=3 is not a known key; did you mean parallel.tp_size? (small.toml:7)",
    ),
    "key of several other sections": (
        "steps = 100", "steps = 100\ninterval = 3",
        ("train.interval=3 is not a known key; did you mean checkpoint.interval, evaluation.interval or "
         "log.interval? (small.toml:13)"),
    ),
    "size of context parallelism": (
        "[train]", "[parallel]\ncp_size = 2\n[train]",
        "parallel.cp_size=2 cannot be set: context parallelism is not implemented; leave cp_size out (small.toml:12)",
    ),
    "size of expert parallelism": (
        "[train]", "[parallel]\nep_size = 2\n[train]",
        "parallel.ep_size=2 cannot be set: expert parallelism is not implemented; leave ep_size out (small.toml:12)",
    ),
    "size of context parallelism outside any section": (
        "[model]", "cp_size = 2\n[model]",
        "cp_size=2 cannot be set: context parallelism is not implemented; leave cp_size out (small.toml:1)",
    ),
    "key like no other": (
        "num_heads = 20", 'num_heads = 20\nzzz = "' + "x" * 100 + '"',
        f'model.zzz="{"x" * 59}... is not a known key; the keys of [model] are {MODEL_KEYS} (small.toml:7)',
    ),
    "misspelled section": (
        "[model]", "[modle]", "[modle] is not a known section; did you mean [model]? (small.toml:1)",
    ),
    "section like no other": (
        "[optimizer]", "[x.y]\nz = 1\n[optimizer]",
        ("[x] is not a known section; the sections are job, model, parallel, batch, train, optimizer, "
         "parameter_group, data, pictures, data_source, data_stage, validation_set, checkpoint, evaluation, log, "
         "profile, kernels, fp8, runtime, telemetry, recovery, diagnostics, dashboard, notify, slack, pagerduty, "
         "email, alertmanager or webhook (small.toml:14)"),
    ),
    "key outside any section": (
        "[model]", "tp_size = 2\n[model]",
        "tp_size=2 is outside any section; did you mean parallel.tp_size? (small.toml:1)",
    ),
    "section within a section": (
        "[batch]", "[model.frobnicate]\nkind = 1\n[batch]",
        "model.frobnicate={kind = 1} is not a known key; the keys of [model] are " + MODEL_KEYS + " (small.toml:8)",
    ),
    "value in place of a section": (
        "[model]", "job = 3\n[model]", "job=3 must be a section; write its keys below a line [job] (small.toml:1)",
    ),
    "list of sections": (
        "[model]", "[[job]]\nname = 'x'\n[model]",
        'job=[{name = "x"}] must be a section; write its keys below a line [job] (small.toml:1)',
    ),
    "text in place of an integer": (
        "num_heads = 20", "num_heads = '20'",
        'model.num_heads="20" must be an integer, such as 8, not a string (small.toml:6)',
    ),
    "float in place of an integer": (
        "num_heads = 20", "num_heads = 20.0",
        "model.num_heads=20.0 must be an integer, such as 8, not a float (small.toml:6)",
    ),
    "boolean in place of an integer": (
        "num_heads = 20", "num_heads = true",
        "model.num_heads=true must be an integer, such as 8, not a boolean (small.toml:6)",
    ),
    "boolean in place of a number": (
        "lr = 1e-3", "lr = false", "optimizer.lr=false must be a number, such as 0.5, not a boolean (small.toml:15)",
    ),
    "integer in place of a boolean": (
        "num_heads = 20", "num_heads = 20\nhas_bias = 1",
        "model.has_bias=1 must be true or false, not an integer (small.toml:7)",
    ),
    "integer in place of a choice": (
        "num_heads = 20", "num_heads = 20\nnorm = 1",
        ('model.norm=1 must be "layernorm", "rmsnorm" or "rmsnorm_zero_centered", or a variant of another package, '
         "not an integer (small.toml:7)"),
    ),
    "list in place of an integer": (
        "num_heads = 20", "num_heads = [20]",
        "model.num_heads=[20] must be an integer, such as 8, not a list of 1 (small.toml:6)",
    ),
    "list of the wrong things": (
        "[train]", "[profile]\nranks = [0, true]\n[train]",
        ("profile.ranks=[0, true] must be a list of integers, such as [0, 8]; element 2 is true, a boolean "
         "(small.toml:12)"),
    ),
    "date in place of a text": (
        "[train]", "[job]\nname = 2024-01-01\n[train]",
        'job.name=2024-01-01 must be a string, such as "text", not a date (small.toml:12)',
    ),
    "missing key": (
        "num_heads = 20\n", "",
        "model.num_heads is missing and has no default; add num_heads = N under [model] (small.toml:1)",
    ),
    "missing section": (
        "[optimizer]\nlr = 1e-3\n", "",
        "optimizer.lr is missing and has no default; add lr = 3e-4 under [optimizer] (small.toml)",
    ),
    "no TOML": (
        "num_heads = 20", "num_heads 20",
        ("not TOML at column 11: Expected '=' after a key in a key/value pair; correct this line or the one before "
         "(small.toml:6)"),
    ),
    "key given twice": (
        "num_heads = 20", "num_heads = 20\nnum_heads = 21",
        "not TOML at column 15: Cannot overwrite a value; correct this line or the one before (small.toml:7)",
    ),
    "end too early": (
        "lr = 1e-3\n", 'lr = """1e-3',
        "not TOML at the end of the file: Unterminated string; correct this line or the one before (small.toml:15)",
    ),
}  # fmt: skip


def test_mistake_in_the_file_is_named_with_its_line(small: Path, problems_of: ProblemsOf) -> None:
    text = small.read_text()
    assert all(old in text for old, _, _ in MISTAKES.values())
    found = {name: problems_of(text=text.replace(old, new, 1)) for name, (old, new, _) in MISTAKES.items()}
    assert found == {name: (expected,) for name, (_, _, expected) in MISTAKES.items()}


def test_all_problems_are_collected(small: Path, problems_of: ProblemsOf) -> None:
    text = small.read_text().replace("num_heads = 20", "num_heads = 20\nnum_layer = 3\nwindow_size = 100")
    text = text.replace("steps = 100\n", "").replace("1e-3", "'fast'")
    overrides = ["--parallel.tp_size=8", "--optimzer.eps=1e-6", "--batch.micro_batch_size=7", "--log.interval=0", "--x"]

    problems = problems_of(*overrides, text=text, world_size=12)

    assert [problem.partition(" ")[0] for problem in problems] == [
        "model.num_layer=3",
        'optimizer.lr="fast"',
        "--x",
        "[optimzer]",
        "train.steps",
        "log.interval=0",
        "model.window_size=100",
        "parallel.tp_size=8",
        "parallel.pp_size",
        "batch.global_batch_size=48",
    ]
    assert "must divide model.num_heads=20; use 1, 2 or 4" in problems[7]
    assert "must divide the world size of 12" in problems[8]


def test_rules_that_rest_on_a_wrong_value_are_left_out(problems_of: ProblemsOf) -> None:
    # num_heads is wrong, so divisibility by it is not checked; the window is wrong independently.
    problems = problems_of("--model.num_heads=none", "--parallel.tp_size=4", "--model.num_kv_heads=3")
    assert [problem.partition(" ")[0] for problem in problems] == ['model.num_heads="none"', "parallel.tp_size=4"]
    assert "must divide model.num_kv_heads=3 or be a multiple of it; use 1 " in problems[1]


def test_empty_file_lists_what_is_missing(problems_of: ProblemsOf) -> None:
    missing = [problem.partition(" is missing")[0] for problem in problems_of(text="")]
    assert missing == [
        "model.vocab_size",
        "model.seq_len",
        "model.hidden_size",
        "model.num_layers",
        "model.num_heads",
        "batch.global_batch_size",
        "train.steps",
        "optimizer.lr",
    ]


def test_overrides_are_judged_even_when_the_file_is_not_toml(problems_of: ProblemsOf) -> None:
    problems = problems_of("--model.num_head=3", "--log.interval=often", text="= 1")
    assert [problem.partition(" ")[0] for problem in problems] == ["not", "model.num_head=3", 'log.interval="often"']


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    expected = "cannot read the configuration file: No such file or directory; give the path of a TOML file"
    assert caught.value.problems == (f"{expected} ({path})",)


def test_byte_order_mark_is_no_part_of_the_file(small: Path) -> None:
    plain = load_config(small)
    small.write_bytes(b"\xef\xbb\xbf" + small.read_bytes())
    assert load_config(small) == plain


OTHER_ENCODING = "the file is UTF-16 or UTF-32, by its byte-order mark; save it as UTF-8 (small.toml)"
MARK_INSIDE = "there is a byte-order mark (U+FEFF) inside the file, from a file that was appended; remove it"
BOM_PROBLEMS: list[tuple[Callable[[str], bytes], str]] = [
    (lambda text: text.encode("utf-16"), OTHER_ENCODING),
    (lambda text: b"\xfe\xff" + text.encode("utf-16-be"), OTHER_ENCODING),
    (lambda text: text.encode("utf-32"), OTHER_ENCODING),
    (lambda text: b"\0\0\xfe\xff" + text.encode("utf-32-be"), OTHER_ENCODING),
    (lambda text: f"[job]\n\ufeff{text}".encode(), f"{MARK_INSIDE} (small.toml:2)"),
    (lambda text: f"\ufeff\ufeff{text}".encode(), f"{MARK_INSIDE} (small.toml:1)"),
    (lambda text: f'\n\n[job]\nname = "a\ufeff"\n{text}'.encode(), f"{MARK_INSIDE} (small.toml:4)"),
]


def test_other_byte_order_marks_are_refused(small: Path) -> None:
    whole = small.read_text()
    for content, problem in BOM_PROBLEMS:
        small.write_bytes(content(whole))
        with pytest.raises(ConfigError) as caught:
            load_config(small)
        assert caught.value.problems == (problem,)


def test_file_that_is_not_utf8(small: Path) -> None:
    small.write_bytes(b"[job]\n# caf\xe9\n" + small.read_bytes())
    with pytest.raises(ConfigError) as caught:
        load_config(small)
    assert caught.value.problems == ("byte 0xe9 is not UTF-8; save the file as UTF-8 (small.toml:2)",)


def test_other_ways_to_write_sections(small: Path) -> None:
    expected = load_config(small).config
    small.write_text(
        'model = {vocab_size = 1000, seq_len = 64, "hidden_size" = 160, num_layers = 8, num_heads = 20}\n'
        'batch.global_batch_size = 48\n"train"."steps" = 100\n[ optimizer ]\nlr = 1e-3\n'
    )
    loaded = load_config(small)

    assert loaded.config == expected
    assert [loaded.origins[key].line for key in ("model.hidden_size", "train.steps", "optimizer.lr")] == [1, 3, 5]
