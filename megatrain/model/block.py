"""Decoder blocks made of branches: norm -> branch_in -> sublayers -> branch_out -> bias, dropout -> residual stream.

serial:             y = x + Attention(norm(x));  z = y + Mlp(norm(y))     two branches of one sublayer
parallel:           y = x + Attention(norm(x)) + Mlp(norm(x))             one branch of two (MegaScale sec. 3.1)
parallel_two_norms: y = x + Attention(norm_1(x)) + Mlp(norm_2(x))         two branches of one sublayer (GPT-NeoX)

A branch has its norm at its input, at its output (after the bias), or at both (`model.branch_norm`).

The sublayers are attention and the MLP. `branch_in` (the input of the sublayers) and `branch_out` (their summed output)
are identities here. A parallel plan may replace them, or the module `sublayers` that contains them. Therefore norm,
bias and dropout are outside of `sublayers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.model.attention import Attention, Positions
from megatrain.model.context import TokenContext
from megatrain.model.dropout import ResidualDropout
from megatrain.model.mlp import Mlp
from megatrain.model.norm import build_norm
from megatrain.ops.attention import AttentionPattern
from megatrain.ops.normalization import ResidualStream


class Sublayers(nn.Module):
    """branch_in -> attention, MLP, or both side by side -> their sum -> branch_out. It has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branch_in = nn.Identity()
        self.branch_out = nn.Identity()

    def forward(
        self,
        normed_SBH: Tensor,
        attention: Attention | None,
        mlp: Mlp | None,
        pattern: AttentionPattern,
        positions: Positions,
    ) -> Tensor:
        """Return the sum of the sublayers' outputs."""
        inner_SBH = self.branch_in(normed_SBH)
        del normed_SBH
        added: list[Tensor] = []
        if attention is not None:
            added.append(attention(inner_SBH, pattern, positions))
        if mlp is not None:
            added.append(mlp(inner_SBH))
        return self.branch_out(added[0] if len(added) == 1 else added[0] + added[1])


class ResidualBranch(nn.Module):
    """Sublayers with their norms: attention, the MLP, or both."""

    def __init__(self, config: ModelConfig, *, attention: bool, mlp: bool, dropout_seed: int, site: str) -> None:
        super().__init__()
        self.norm = build_norm(config) if config.branch_norm != "output" else None
        self.output_norm = build_norm(config) if config.branch_norm != "input" else None
        self.sublayers = Sublayers()
        self.attention = Attention(config) if attention else None
        self.mlp = Mlp(config) if mlp else None
        # each sublayer has its own bias, as in imported models; the sum of both is added once, after branch_out
        self.attention_bias = nn.Parameter(torch.empty(config.hidden_size)) if config.has_bias and attention else None
        self.mlp_bias = nn.Parameter(torch.empty(config.hidden_size)) if config.has_bias and mlp else None
        self.dropout = ResidualDropout(config.dropout, dropout_seed, site)

    def forward(
        self,
        stream: ResidualStream,
        context: TokenContext,
        pattern: AttentionPattern,
        positions: Positions,
        onto_SBH: Tensor | None = None,
    ) -> ResidualStream:
        """Return onto_SBH + the branch's output for `stream`. onto_SBH: None means the sum of `stream`."""
        if self.norm is not None:
            normed_SBH, x_SBH = self.norm(stream)
        else:
            normed_SBH = x_SBH = stream.total()
        if onto_SBH is not None:
            x_SBH = onto_SBH
        y_SBH = self.sublayers(normed_SBH, self.attention, self.mlp, pattern, positions)
        del normed_SBH
        biases = [bias for bias in (self.attention_bias, self.mlp_bias) if bias is not None]
        bias_H = sum(biases[1:], biases[0]) if biases else None
        if self.output_norm is not None:
            y_SBH, _ = self.output_norm(ResidualStream(y_SBH if bias_H is None else y_SBH + bias_H))
            bias_H = None
        if bias_H is None and not self.dropout.is_active:
            return ResidualStream(x_SBH, y_SBH)
        return ResidualStream(self.dropout.add(x_SBH, y_SBH, bias_H, context))


class Block(nn.Module):
    """One decoder layer: its branches in order."""

    def __init__(self, config: ModelConfig, layer: int, dropout_seed: int) -> None:
        super().__init__()
        self.has_one_input = config.block == "parallel_two_norms"
        if config.block == "parallel":
            self.branch = ResidualBranch(
                config, attention=True, mlp=True, dropout_seed=dropout_seed, site=f"{layer}.branch"
            )
        else:
            self.attention_branch = ResidualBranch(
                config, attention=True, mlp=False, dropout_seed=dropout_seed, site=f"{layer}.attention"
            )
            self.mlp_branch = ResidualBranch(
                config, attention=False, mlp=True, dropout_seed=dropout_seed, site=f"{layer}.mlp"
            )

    def forward(
        self,
        stream: ResidualStream,
        context: TokenContext,
        pattern: AttentionPattern,
        positions: Positions,
    ) -> ResidualStream:
        if self.has_one_input:
            stream = ResidualStream(stream.total())
            attended = self.attention_branch(stream, context, pattern, positions)
            return self.mlp_branch(stream, context, pattern, positions, attended.total())
        for branch in self.children():
            stream = branch(stream, context, pattern, positions)
        return stream
