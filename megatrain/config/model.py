"""Section [model]: the shape and the mathematics of the transformer.

These keys can express GPT-2, GPT-3, GPT-NeoX, Llama, Qwen, Mistral, Gemma, OLMo 2, Phi-3 and MegaScale's models.
Nothing here depends on how the model is spread over ranks. The largest sizes allowed are at least 100 times those of
any model known today: a larger value is a typing error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import REQUIRED, option, options_of
from megatrain.config.variants import load_variant

SCALING_KEYS_OF: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "dynamic": ("rope_scaling_factor", "rope_original_seq_len"),
    "yarn": (
        "rope_scaling_factor",
        "rope_original_seq_len",
        "rope_beta_fast",
        "rope_beta_slow",
        "rope_attention_factor",
    ),
    "llama3": ("rope_scaling_factor", "rope_original_seq_len", "rope_low_freq_factor", "rope_high_freq_factor"),
}
"""The keys that each value of rope_scaling uses. A variant of another package may use all of them."""
SCALING_KEYS = frozenset(key for keys in SCALING_KEYS_OF.values() for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the mathematics of the transformer."""

    vocab_size: int = option(
        REQUIRED, "Tokens that the tokenizer can produce.", unit="tokens", minimum=1, maximum=1_000_000_000
    )
    seq_len: int = option(
        REQUIRED,
        "Largest number of tokens of a sample that the model takes. Training samples have this length unless "
        "data.seq_len is set.",
        unit="tokens",
        minimum=1,
        maximum=10_000_000_000,
    )
    hidden_size: int = option(REQUIRED, "Width of the residual stream.", minimum=1, maximum=10_000_000)
    num_layers: int = option(REQUIRED, "Transformer blocks.", minimum=1, maximum=1_000_000)
    num_heads: int = option(REQUIRED, "Query heads of attention.", minimum=1, maximum=1_000_000)
    num_kv_heads: int = option(
        0,
        "Key and value heads (grouped-query attention when fewer than num_heads). 0: as many as num_heads. If "
        "parallel.tp_size is a larger multiple of this number, several ranks hold the same head.",
        minimum=0,
        maximum=1_000_000,
    )
    head_dim: int = option(0, "Width of one attention head. 0: hidden_size / num_heads.", minimum=0, maximum=1_000_000)
    ffn_size: int = option(
        0, "Inner width of the feed-forward network. 0: 4 * hidden_size.", minimum=0, maximum=100_000_000
    )
    block: Literal["serial", "parallel", "parallel_two_norms"] = option(
        "serial",
        "serial: attention, then feed-forward, each with its own norm. parallel: both read one norm and are added "
        "(MegaScale sec. 3.1), which halves the tensor-parallel communication of a block. parallel_two_norms: both "
        "read the block's input, each through its own norm (GPT-NeoX).",
    )
    norm: str = option(
        "layernorm",
        "Kind of normalization. rmsnorm_zero_centered: the scale is 1 + weight, and weights start at 0 (Gemma).",
        choices=("layernorm", "rmsnorm", "rmsnorm_zero_centered"),
        has_variants=True,
    )
    branch_norm: Literal["input", "output", "both"] = option(
        "input",
        "Where attention and feed-forward have their norms. input: before them. output: on what they add to the "
        "stream (OLMo 2). both: two norms each (Gemma 2 and 3).",
    )
    norm_eps: float = option(1e-5, "Added to the variance or the mean square before the root.", above=0)
    mlp: str = option(
        "gelu",
        "gelu: up, GELU (tanh form), down. gelu_exact: the same with the error function. swiglu: SiLU(gate) * up, "
        "then down: three matrices. geglu: the same with GELU (tanh form).",
        choices=("gelu", "gelu_exact", "swiglu", "geglu"),
        has_variants=True,
    )
    has_bias: bool = option(True, "Whether the linear layers of attention and feed-forward have biases.")
    has_qkv_bias: bool = option(
        False, "Whether the projection to queries, keys and values has biases even with has_bias = false (Qwen 2)."
    )
    qk_norm: Literal["none", "head", "all_heads"] = option(
        "none",
        "RMSNorm of queries and keys before the rotation. head: over each head, with one scale for all heads "
        "(Qwen 3). all_heads: over all heads together (OLMo 2).",
    )
    attention: str = option(
        "softmax",
        "What is computed from queries, keys and values. softmax: causal attention, by the kernel that "
        "kernels.attention chooses.",
        choices=("softmax",),
        has_variants=True,
    )
    attention_scale: float = option(0.0, "Factor of the attention scores. 0: 1 / sqrt(head_dim).", minimum=0)
    attention_softcap: float = option(
        0.0, "c: each attention score s becomes c * tanh(s / c) before softmax (Gemma 2: 50). 0: no cap.", minimum=0
    )
    head_softcap: float = option(0.0, "c: each logit z becomes c * tanh(z / c) (Gemma 2: 30). 0: no cap.", minimum=0)
    has_scaled_embedding: bool = option(
        False, "Whether the embedding of a token is multiplied by sqrt(hidden_size) (Gemma)."
    )
    positions: str = option(
        "learned",
        "learned: a table of seq_len vectors added to the embedding. rope: rotary, inside attention. none: only "
        "the causal mask orders the tokens (NoPE, arXiv:2305.19466).",
        choices=("learned", "rope", "none"),
        has_variants=True,
    )
    rope_theta: float = option(10000.0, "Base of the rotary wavelengths.", above=1, maximum=10**15)
    rope_local_theta: float = option(
        0.0,
        "Base of the rotary wavelengths in layers with a window. These wavelengths are never stretched (Gemma 3: "
        "10000). 0: the same wavelengths as in the other layers.",
        minimum=0,
        maximum=10**15,
    )
    rope_fraction: float = option(
        1.0, "The part of each head, from its first unit on, that is rotated (GPT-NeoX: 0.25).", above=0, maximum=1
    )
    rope_scaling: str = option(
        "none",
        "How rotary positions are stretched to a longer context. linear: all wavelengths. dynamic: by a larger "
        "base, which grows with seq_len beyond rope_original_seq_len. yarn: long wavelengths, with larger scores "
        "(arXiv:2309.00071). llama3: long wavelengths, by the rule published with Llama 3.1.",
        choices=("none", "linear", "dynamic", "yarn", "llama3"),
        has_variants=True,
    )
    rope_scaling_factor: float = option(1.0, "By how much the rotary wavelengths are stretched.", minimum=1)
    rope_low_freq_factor: float = option(
        1.0,
        "llama3 scaling: wavelengths above rope_original_seq_len / rope_low_freq_factor are stretched in full.",
        above=0,
    )
    rope_high_freq_factor: float = option(
        4.0,
        "llama3 scaling: wavelengths below rope_original_seq_len / rope_high_freq_factor stay as they are.",
        above=0,
    )
    rope_beta_fast: float = option(
        32.0,
        "yarn scaling: wavelengths that turn more often than this within rope_original_seq_len stay as they are.",
        above=0,
    )
    rope_beta_slow: float = option(
        1.0,
        "yarn scaling: wavelengths that turn less often than this within rope_original_seq_len are stretched in full.",
        above=0,
    )
    rope_attention_factor: float = option(
        0.0, "yarn scaling: factor of the rotated queries and keys. 0: 0.1 * ln(rope_scaling_factor) + 1.", minimum=0
    )
    rope_original_seq_len: int = option(
        8192, "dynamic, yarn and llama3 scaling: the context length before it was stretched.", unit="tokens", minimum=1
    )
    window_size: int = option(
        0,
        "Sliding-window attention: each token attends to itself and the window_size - 1 tokens before it. 0: all "
        "tokens before it.",
        unit="tokens",
        minimum=0,
    )
    full_attention_every: int = option(
        0,
        "n: with a window, each nth layer attends to all earlier tokens (Gemma 2: 2, Gemma 3: 6). 0: no layer.",
        unit="layers",
        minimum=0,
    )
    dropout: float = option(
        0.0,
        "Probability of dropping an element of the embedding, and of what a block adds to the residual stream.",
        minimum=0,
        below=1,
    )
    init_std: float = option(
        0.02, "Standard deviation of the initial weights (normal distribution).", above=0, maximum=1000
    )
    is_residual_init_scaled: bool = option(
        True, "Whether the output projections of attention and feed-forward start with init_std / sqrt(2 * num_layers)."
    )
    has_tied_head: bool = option(True, "Whether the output head uses the word embedding as its weight.")
    vocab_multiple: int = option(
        128,
        "The vocabulary is padded to a multiple of this, the same in every layout. Padding is never predicted.",
        unit="tokens",
        minimum=1,
        maximum=1_000_000,
    )
    picture_size: int = option(
        0,
        "Width and height of the picture of a sample. An encoder and a projector turn its patches into the first "
        "rows of the sequence, before the tokens of the text. 0: samples have no pictures.",
        unit="pixels",
        minimum=0,
        maximum=1_000_000,
    )
    patch_size: int = option(
        16, "Width and height of a patch; it divides picture_size.", unit="pixels", minimum=1, maximum=1_000_000
    )
    encoder_hidden_size: int = option(
        0, "Width of the encoder of pictures. 0: hidden_size.", minimum=0, maximum=10_000_000
    )
    encoder_num_layers: int = option(
        0, "Transformer blocks of the encoder of pictures. 0: num_layers.", minimum=0, maximum=1_000_000
    )
    encoder_num_heads: int = option(
        0, "Attention heads of the encoder of pictures. 0: num_heads.", minimum=0, maximum=1_000_000
    )
    encoder_ffn_size: int = option(
        0,
        "Inner width of the feed-forward network in the encoder of pictures. 0: 4 * its hidden size.",
        minimum=0,
        maximum=100_000_000,
    )

    @property
    def has_pictures(self) -> bool:
        return self.picture_size > 0

    @property
    def num_patches(self) -> int:
        """The patches of a sample's picture, which are the first rows of its sequence; 0 without pictures."""
        return (self.picture_size // self.patch_size) ** 2

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
    def rotated_dim(self) -> int:
        """The number of units of a head that rotary positions rotate."""
        return int(self.resolved_head_dim * self.rope_fraction)

    @property
    def is_mlp_gated(self) -> bool:
        if self.mlp in ("swiglu", "geglu"):
            return True
        return not self.is_own("mlp") and bool(load_variant("mlp", self.mlp).is_gated)

    def is_own(self, key: str) -> bool:
        """Return whether the value of `key` is built into megatrain, and not the name of another package's variant."""
        return getattr(self, key) in options_of(ModelConfig)[key].choices

    @property
    def has_window(self) -> bool:
        """Whether layers have a window that is shorter than `seq_len`."""
        return 0 < self.window_size < self.seq_len

    def window_of(self, layer: int) -> int:
        """Return the window of a layer; 0 if the layer attends to all earlier tokens.

        The window may be longer than a sample. Even then, the layer uses rope_local_theta if that is set.
        """
        is_full = self.full_attention_every > 0 and (layer + 1) % self.full_attention_every == 0
        return 0 if is_full else self.window_size

    @property
    def resolved_ffn_size(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`, whatever the layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
