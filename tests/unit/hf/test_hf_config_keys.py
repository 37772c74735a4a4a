"""No key of a config.json is ignored: a change is refused, or we compute what transformers computes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.contracts.errors import CheckpointError
from megatrain.hf import open_model
from megatrain.hf.families import FAMILIES, IGNORED
from tests.helpers.hf_models import LOGITS_BOUND, assert_same_logits, our_logits, some_tokens, their_logits, tiny
from tests.helpers.huggingface import oracle, with_images
from tests.helpers.require import lazy_module

transformers = lazy_module("transformers")

WITHOUT_EFFECT = IGNORED.union(*(family.ignored for family in FAMILIES))
CASES = (
    "llama", "llama-3.1", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "neox",
    "gpt2",
)  # fmt: skip
NESTED = "text_config"
"""The key of the object that describes the language model, in files of models with images."""
ADDED: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 7, "logit_scale": 0.1,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "use_qk_norm": True, "num_local_experts": 4,
    "partial_rotary_factor": 0.5, "use_parallel_residual": True, "clip_qkv": 1.0, "auto_map": {"AutoModel": "x.Y"},
}  # fmt: skip
"""Keys of other families, as in models that are nearly one of ours."""


def changed(value: Any) -> Iterator[Any]:
    """Yield other values for a key than this one."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value, 1)
        case float():
            yield from (2 * value + 0.5, value / 2)
        case str():
            yield from (f"{value}x", "gelu", "dynamic", "linear", "full_attention")
        case list():
            yield from (value[:1], [*value[1:], "sliding_attention"], [])
        case dict():
            yield {}
            for key, inner in value.items():
                yield from ({**value, key: other} for other in changed(inner))
            yield {**value, "attention_factor": 2.0}
        case None:
            yield from (True, 3, 0.5, "x")


def changes_of(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield a key, another value, and the whole file with it."""
    for key, value in config.items():
        if key == NESTED:
            # Once for each key: the case of the same model without images has the other values.
            once: dict[str, tuple[Any, dict[str, Any]]] = {}
            for inner, other, whole in changes_of(value):
                once.setdefault(inner, (other, config | {key: whole}))
            yield from ((inner, other, whole) for inner, (other, whole) in once.items())
            others: list[Any] = [{}]
        else:
            others = [other for other in changed(value) if other != value]
        # Such a key is ignored by its name, for any value.
        yield from ((key, other, config | {key: other}) for other in (others[:1] if key in WITHOUT_EFFECT else others))
        if value is not None:
            yield key, None, config | {key: None}
    added = {key: value for key, value in ADDED.items() if config.get(key) is None}
    yield from ((key, value, config | {key: value}) for key, value in added.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "gemma3-images"])
def test_a_changed_key_is_refused_or_computed(case: str, tmp_path: Path) -> None:
    model = tiny(case.removesuffix("-images"))
    theirs = oracle(model, torch.float32)
    if case.endswith("-images"):
        theirs = with_images(theirs)
    theirs.save_pretrained(tmp_path)
    path, all_tokens = tmp_path / "config.json", some_tokens(model)
    config = {**theirs.config.to_dict(), **json.loads(path.read_text())}
    num_computed = num_refused = 0
    for key, value, whole in changes_of(config):
        path.write_text(json.dumps(whole))
        try:
            opened = open_model(tmp_path)
            tokens = all_tokens[: opened.model.seq_len]
            found = our_logits(dict(opened.parameters()), opened.model, tokens)
        except CheckpointError:
            num_refused += 1
            continue
        num_computed += 1
        try:
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
            for part in (again.config, again.config.get_text_config()):
                part.return_dict = True
            expected = their_logits(again, tokens)
        except Exception:  # noqa: BLE001  whatever it is, there is nothing to compare with
            # null counts as missing here, and a whole number is a number.
            is_loose = value is None or isinstance(value, int)
            assert is_loose or key in WITHOUT_EFFECT, f"transformers cannot compute {key}={value!r}, and we do"
            continue
        # Relative to the largest logit: some values make attention so sharp that it amplifies the rounding of both
        # sides.
        bound = LOGITS_BOUND * max(1.0, expected.abs().max().item())
        assert_same_logits(found, expected, bound, f"{key}={value!r} in {whole}")
    assert num_computed > 20
    assert num_refused > 20
