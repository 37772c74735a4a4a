"""The families that can be exported and imported, and the choice of a model's family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatrain.config.batch import BatchConfig
from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.train import TrainConfig
from megatrain.config.variants import load_families
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import Family
from megatrain.hf.gemma2 import Gemma2
from megatrain.hf.gemma3 import Gemma3
from megatrain.hf.gemma3_images import Gemma3Images
from megatrain.hf.gpt2 import Gpt2
from megatrain.hf.gpt_neox import GptNeoX
from megatrain.hf.llama import Llama
from megatrain.hf.mistral import Mistral
from megatrain.hf.olmo2 import Olmo2
from megatrain.hf.phi3 import Phi3
from megatrain.hf.qwen2 import Qwen2
from megatrain.hf.qwen3 import Qwen3

FAMILIES: tuple[Family, ...] = (
    Llama(),
    Qwen2(),
    Qwen3(),
    Mistral(),
    Gemma2(),
    Gemma3(),
    Gemma3Images(),
    Olmo2(),
    Phi3(),
    Gpt2(),
    GptNeoX(),
    *load_families(),
)
"""All families: megatrain's, and those that other packages add (docs/guides/extending.md)."""

_EXPORTED = tuple(family for family in FAMILIES if family.is_exported)
_HINT = (
    f"what can be exported: models of {', '.join(family.architecture for family in _EXPORTED)}; "
    "docs/guides/checkpoints.md has the keys of each"
)
IGNORED = frozenset(
    {
        # names, versions, and how the weights are stored
        "model_type", "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "name_or_path",
        "tokenizer_class", "_commit_hash", "transformers.js_config",
        # what a call returns, and which implementation computes it
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "attn_implementation",
        "_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward", "gradient_checkpointing",
        # tokens and generation
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
        "diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
        "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
        "prefix", "max_new_tokens",
        # uses other than as a language model
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    }
)  # fmt: skip
"""Keys of any config.json that do not change what a language model computes in training."""
_OTHER_KINDS = ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder")
"""Keys that must be false or absent, in every family."""


def family_for_export(model: ModelConfig) -> Family:
    """Return the family that can represent `model`.

    Raises: ConfigError, which names every key that prevents the export.
    """
    problems = {family: family.problems(model) for family in _EXPORTED}
    nearest = min(_EXPORTED, key=lambda family: len(problems[family]))
    if problems[nearest]:
        raise ConfigError([f"{problem}; {_HINT}" for problem in problems[nearest]])
    return nearest


def _family_of(config: ConfigJson) -> Family:
    """Return the family that a config.json names.

    Raises: CheckpointError for any other model.
    """
    config.require("model_type", [family.model_type for family in FAMILIES], default=None)
    if "quantization_config" in config:
        raise config.refusal("quantization_config", "quantized weights cannot be trained; import the original model")
    return next(family for family in FAMILIES if family.model_type == config.text("model_type"))


def read_config(config: ConfigJson) -> tuple[Family, ModelConfig, tuple[str, ...]]:
    """Return the family of a config.json, its ModelConfig, and notes on what ModelConfig cannot represent.

    Raises: CheckpointError, which names the file, and the key or the violated rule.
    """
    family = _family_of(config)
    described = family.language_model(config)
    model = _read_model(family, described)
    notes = tuple(family.import_notes(described))
    for part in (config, described):
        for key in _OTHER_KINDS:
            part.require(key, (False,), default=False)
        part.refuse_unread(IGNORED | family.ignored)
    return family, model, notes


def _read_model(family: Family, config: ConfigJson) -> ModelConfig:
    values: dict[str, Any] = dict(family.fixed) | family.read_config(config)
    model = ModelConfig(**values)
    # check() needs a complete configuration, so the other sections get arbitrary values
    job = Config(
        model=model,
        batch=BatchConfig(global_batch_size=1),
        train=TrainConfig(steps=1),
        optimizer=OptimizerConfig(lr=1.0),
    )
    problems = check(job, {}, None)
    if problems:
        raise CheckpointError(f"{config.location}: describes no model that can be built: {'; '.join(problems)}")
    return model


def section_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of [model]."""
    return {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
