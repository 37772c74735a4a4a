"""The rules between keys of the model: each message names keys, values, rule, hint and place."""

from __future__ import annotations

import pytest

# What is set, and the whole of the one message that follows. The place is that of the first key that somebody wrote.
CASES = {
    "grouped heads": (
        ["--model.num_kv_heads=8"],
        (
            "model.num_kv_heads=8 must divide model.num_heads=20; use 1, 2, 4, 5, 10 or 20 "
            "(--model.num_kv_heads on the command line)"
        ),
    ),
    "heads and width": (
        ["--model.hidden_size=162"],
        (
            "model.num_heads=20 must divide model.hidden_size=162; use 1, 2, 3, 6, 9, 18, 27 or 54, "
            "hidden_size 160 or 180, or set model.head_dim (small.toml:6)"
        ),
    ),
    "explicit head width": (["--model.hidden_size=162", "--model.head_dim=8"], None),
    "rotary head width": (
        ["--model.head_dim=7", "--model.positions=rope"],
        (
            'model.head_dim=7 must be even for model.positions="rope", which turns pairs; use 6 or 8 '
            "(--model.head_dim on the command line)"
        ),
    ),
    "odd head without rotary": (["--model.head_dim=7"], None),
    "rotary scaling without rotary": (
        ["--model.rope_scaling=linear"],
        (
            'model.rope_scaling="linear" needs model.positions="rope", found "learned"; use positions="rope" or '
            'rope_scaling="none" (--model.rope_scaling on the command line)'
        ),
    ),
    "unused scaling factor": (
        ["--model.positions=rope", "--model.rope_scaling_factor=2"],
        (
            'model.rope_scaling_factor=2.0 does nothing with model.rope_scaling="none"; use rope_scaling="linear" or '
            '"llama3", or rope_scaling_factor=1.0 (--model.rope_scaling_factor on the command line)'
        ),
    ),
    "llama3 factors": (
        [
            "--model.positions=rope",
            "--model.rope_scaling=llama3",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=4",
        ],
        (
            "model.rope_low_freq_factor=4.0 must be less than model.rope_high_freq_factor=4.0; Llama 3.1 has 1.0 and "
            "4.0 (--model.rope_low_freq_factor on the command line)"
        ),
    ),
    "scaling by nothing": (
        ["--model.positions=rope", "--model.rope_scaling=linear"],
        (
            'model.rope_scaling_factor=1.0 leaves model.rope_scaling="linear" without effect; use a factor above 1 '
            '(Llama 3.1 has 8.0) or rope_scaling="none" (--model.rope_scaling on the command line)'
        ),
    ),
    "llama3 key of linear scaling": (
        [
            "--model.positions=rope",
            "--model.rope_scaling=linear",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=2",
        ],
        (
            'model.rope_low_freq_factor=2.0 does nothing with model.rope_scaling="linear"; use rope_scaling="llama3" '
            "or rope_low_freq_factor=1.0 (--model.rope_low_freq_factor on the command line)"
        ),
    ),
    "llama3 key without scaling": (
        ["--model.positions=rope", "--model.rope_high_freq_factor=8"],
        (
            'model.rope_high_freq_factor=8.0 does nothing with model.rope_scaling="none"; use rope_scaling="llama3" '
            "or rope_high_freq_factor=4.0 (--model.rope_high_freq_factor on the command line)"
        ),
    ),
    "llama3 length without rotary": (
        ["--model.rope_original_seq_len=32"],
        (
            'model.rope_original_seq_len=32 does nothing with model.rope_scaling="none"; use rope_scaling="llama3" '
            "or rope_original_seq_len=8192 (--model.rope_original_seq_len on the command line)"
        ),
    ),
    "llama3 with all of its keys": (
        [
            "--model.positions=rope",
            "--model.rope_theta=500000",
            "--model.rope_scaling=llama3",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=2",
            "--model.rope_high_freq_factor=8",
            "--model.rope_original_seq_len=32",
        ],
        None,
    ),
    "rotary base without rotary": (
        ["--model.rope_theta=500000"],
        (
            'model.rope_theta=500000.0 does nothing with model.positions="learned"; use positions="rope" or '
            "rope_theta=10000.0 (--model.rope_theta on the command line)"
        ),
    ),
    "window": (
        ["--model.window_size=65"],
        (
            "model.window_size=65 must be at most model.seq_len=64; use 64 or less, or 0 for no window "
            "(--model.window_size on the command line)"
        ),
    ),
    "window of the whole sequence": (["--model.window_size=64"], None),
}


@pytest.mark.parametrize(("overrides", "expected"), CASES.values(), ids=CASES.keys())
def test_rule_of_the_model(problems_of, overrides: list[str], expected: str | None) -> None:
    assert problems_of(*overrides) == (() if expected is None else (expected,))
