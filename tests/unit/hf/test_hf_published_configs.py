"""The config.json of published models, as in their model cards: they are read completely, have the published size, and
are planned.

Source: the repositories of these names on Hugging Face's hub. Keys about tokens and versions are shortened.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config.batch import BatchConfig
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.parallel import ParallelConfig
from megatrain.config.train import TrainConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.families import read_config
from megatrain.planning.run_plan import plan_run

COMMON: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_cache": True, "hidden_act": "silu", "initializer_range": 0.02,
}  # fmt: skip
LLAMA = COMMON | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "pretraining_tp": 1,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "meta-llama/Llama-2-7b-hf": (
        LLAMA | {
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "vocab_size": 32000,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "tie_word_embeddings": False,
        },
        6_738_415_616,
    ),
    "meta-llama/Llama-3.1-8B": (
        LLAMA | {
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "vocab_size": 128256,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": False, "mlp_bias": False,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
            },
        },
        8_030_261_248,
    ),
    "HuggingFaceTB/SmolLM-135M": (
        LLAMA | {
            "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 2048, "vocab_size": 49152,
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "is_llama_config": True,
            "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        },
        134_515_008,
    ),
    "Qwen/Qwen2.5-7B": (
        COMMON | {
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "vocab_size": 152064,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
            "use_mrope": False, "use_sliding_window": False,
        },
        7_615_616_512,
    ),
    "Qwen/Qwen3-8B": (
        COMMON | {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
            "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "mistralai/Mistral-7B-v0.1": (
        COMMON | {
            "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "google/gemma-2-2b": (
        COMMON | {
            "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
            "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
            "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "google/gemma-3-1b-pt": (
        {key: value for key, value in COMMON.items() if key != "hidden_act"} | {
            "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
            "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        999_885_952,
    ),
    "google/gemma-3-4b-pt": (
        {
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
            "eoi_token_index": 256000, "image_token_index": 262144, "initializer_range": 0.02,
            "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
            },
        },
        3_880_263_168,
    ),
    "allenai/OLMo-2-1124-7B": (
        COMMON | {
            "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
        },
        7_298_617_344,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        COMMON | {
            "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_size": 3072, "intermediate_size": 8192,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "max_position_embeddings": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "vocab_size": 32064,
        },
        3_821_079_552,
    ),
    "EleutherAI/pythia-70m": (
        COMMON | {
            "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu",
            "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
            "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25,
            "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
        },
        70_426_624,
    ),
    "openai-community/gpt2": (
        {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}  # fmt: skip
"""Name -> (config.json, parameters of the published checkpoint)."""


def padding_of(model: ModelConfig) -> int:
    """Return the number of parameters in rows that pad the vocabulary."""
    return (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.has_tied_head else 2)


def test_published_configs_are_read_and_have_the_published_size() -> None:
    for name, (values, published) in PUBLISHED.items():
        family, model, _ = read_config(ConfigJson(values, name))
        assert num_parameters(model) - padding_of(model) == published, name
        assert family.problems(model) == [], name


@pytest.mark.slow(kept=["openai-community/gpt2"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_planned_on_8_ranks(name: str) -> None:
    values, published = PUBLISHED[name]
    _, model, _ = read_config(ConfigJson(values, name))

    plan = plan_run(
        Config(
            model=model,
            parallel=ParallelConfig(pp_size=2, dp_size=4, recompute="full"),
            batch=BatchConfig(global_batch_size=8),
            train=TrainConfig(steps=1, precision="bf16"),
            optimizer=OptimizerConfig(lr=1e-4),
        )
    )

    assert plan.layout.world_size == 8
    assert plan.num_parameters - padding_of(model) == published
    # a tied head is on the last stage, and a copy of it on the first
    copied = model.padded_vocab_size * model.hidden_size if model.has_tied_head else 0
    assert sum(stage.num_parameters for stage in plan.stages) == plan.num_parameters + copied
    assert plan.checkpoint_bytes == 12 * plan.num_parameters
    for stage in plan.stages:
        assert stage.memory.total > stage.memory.parameters > 0
        assert stage.memory.activations > 0
        assert any(one.num_bytes > 0 for one in stage.traffic)
