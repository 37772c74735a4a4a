"""Section [model]: the shape and the mathematics of the transformer.

GPT-2, GPT-3, Llama, Qwen, Mistral and MegaScale's models are values of these keys. Nothing here depends on how the
model is spread over ranks. The largest sizes allowed are at least 100 times those of any model known today: a larger
value is a typing error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the mathematics of the transformer."""

    vocab_size: int = field(
        metadata=option("Tokens that the tokenizer can produce.", unit="tokens", minimum=1, maximum=1_000_000_000)
    )
    seq_len: int = field(
        metadata=option("Length of a training sample.", unit="tokens", minimum=1, maximum=10_000_000_000)
    )
    hidden_size: int = field(metadata=option("Width of the residual stream.", minimum=1, maximum=10_000_000))
    num_layers: int = field(metadata=option("Transformer blocks.", minimum=1, maximum=1_000_000))
    num_heads: int = field(metadata=option("Query heads of attention.", minimum=1, maximum=1_000_000))
    num_kv_heads: int = field(
        default=0,
        metadata=option(
            "Key and value heads (grouped-query attention when fewer than num_heads). 0: as many as num_heads. Where "
            "parallel.tp_size is a multiple of them, several ranks hold the same head.",
            minimum=0,
            maximum=1_000_000,
        ),
    )
    head_dim: int = field(
        default=0,
        metadata=option("Width of one attention head. 0: hidden_size / num_heads.", minimum=0, maximum=1_000_000),
    )
    ffn_size: int = field(
        default=0,
        metadata=option("Inner width of the feed-forward network. 0: 4 * hidden_size.", minimum=0, maximum=100_000_000),
    )
    block: Literal["serial", "parallel"] = field(
        default="serial",
        metadata=option(
            "serial: attention, then feed-forward, each with its own norm. parallel: both read one norm and are added "
            "(MegaScale sec. 3.1), which halves the tensor-parallel communication of a block."
        ),
    )
    norm: Literal["layernorm", "rmsnorm"] = field(default="layernorm", metadata=option("Kind of normalization."))
    norm_eps: float = field(
        default=1e-5, metadata=option("Added to the variance or the mean square before the root.", above=0)
    )
    mlp: Literal["gelu", "swiglu"] = field(
        default="gelu",
        metadata=option("gelu: up, GELU (tanh form), down. swiglu: SiLU(gate) * up, then down: three matrices."),
    )
    has_bias: bool = field(
        default=True, metadata=option("Whether the linear layers of attention and feed-forward have biases.")
    )
    has_qkv_bias: bool = field(
        default=False,
        metadata=option(
            "Whether the projection to queries, keys and values has biases even with has_bias = false (Qwen 2)."
        ),
    )
    qk_norm: Literal["none", "head"] = field(
        default="none",
        metadata=option(
            "head: RMSNorm over each head's queries and keys before the rotation, with one scale for all heads "
            "(Qwen 3)."
        ),
    )
    positions: Literal["learned", "rope"] = field(
        default="learned",
        metadata=option("learned: a table of seq_len vectors added to the embedding. rope: rotary, inside attention."),
    )
    rope_theta: float = field(
        default=10000.0, metadata=option("Base of the rotary wavelengths.", above=1, maximum=10**15)
    )
    rope_scaling: Literal["none", "linear", "llama3"] = field(
        default="none",
        metadata=option(
            "How rotary positions are stretched to a longer context. linear: all wavelengths. llama3: only the long "
            "ones, by the rule published with Llama 3.1."
        ),
    )
    rope_scaling_factor: float = field(
        default=1.0, metadata=option("By how much the rotary wavelengths are stretched.", minimum=1)
    )
    rope_low_freq_factor: float = field(
        default=1.0,
        metadata=option(
            "llama3 scaling: wavelengths above rope_original_seq_len / this are stretched in full.", above=0
        ),
    )
    rope_high_freq_factor: float = field(
        default=4.0,
        metadata=option("llama3 scaling: wavelengths below rope_original_seq_len / this stay as they are.", above=0),
    )
    rope_original_seq_len: int = field(
        default=8192,
        metadata=option("llama3 scaling: the context length before it was stretched.", unit="tokens", minimum=1),
    )
    window_size: int = field(
        default=0,
        metadata=option(
            "Sliding-window attention: each token sees itself and the window_size - 1 tokens before it. 0: all tokens "
            "before it.",
            unit="tokens",
            minimum=0,
        ),
    )
    dropout: float = field(
        default=0.0,
        metadata=option(
            "Probability of dropping an element of the embedding and of each block's outputs.", minimum=0, below=1
        ),
    )
    init_std: float = field(
        default=0.02,
        metadata=option("Standard deviation of the initial weights (normal distribution).", above=0, maximum=1000),
    )
    is_residual_init_scaled: bool = field(
        default=True,
        metadata=option(
            "Whether the output projections of attention and feed-forward start with init_std / sqrt(2 * num_layers)."
        ),
    )
    has_tied_head: bool = field(
        default=True, metadata=option("Whether the output head uses the word embedding as its weight.")
    )
    vocab_multiple: int = field(
        default=128,
        metadata=option(
            "The vocabulary is padded to a multiple of this, the same in every layout. Padding is never predicted.",
            unit="tokens",
            minimum=1,
            maximum=1_000_000,
        ),
    )

    @property
    def resolved_num_kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def resolved_has_qkv_bias(self) -> bool:
        return self.has_bias or self.has_qkv_bias

    @property
    def resolved_ffn_size(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`, whatever the layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
