"""The end of the model: final norm, vocabulary projection and the loss.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, T = S * B.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import ConfigError
from megatrain.model.norm import build_norm
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms, Observe, summed_cross_entropy
from megatrain.ops.linear import linear
from megatrain.ops.normalization import ResidualStream
from megatrain.ops.precision import accumulate_dtype
from megatrain.ops.softcap import softcap_


class CrossEntropy(nn.Module):
    """The summed loss of all tokens whose label is not ignored.

    A parallel plan replaces this module if the vocabulary is sharded. terms: the terms that training adds; evaluation
    has only the cross entropy. observe: if set, it is called with the loss of each token in training.
    """

    def __init__(self, vocab_size: int, terms: LossTerms = CROSS_ENTROPY_ALONE) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.terms = terms
        self.observe: Observe | None = None

    def forward(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return the summed loss, fp32 (fp64 for fp64). Backward overwrites the logits: they must have no other use."""
        if not self.training:
            return summed_cross_entropy(logits_TV, labels_T, self.vocab_size)
        return summed_cross_entropy(logits_TV, labels_T, self.vocab_size, terms=self.terms, observe=self.observe)


class CustomLoss(nn.Module):
    """The summed loss of a micro-batch by a user's function, which gets logits without the padding of the vocabulary.

    loss: gets the logits [T, vocab_size] and the labels [T]. built_in: the module that this one replaces in training;
    evaluation still uses it. gather: joins the columns of all ranks if the vocabulary is sharded; each of these ranks
    then calls the function.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        vocab_size: int,
        built_in: nn.Module,
        gather: Callable[[Tensor], Tensor] = lambda logits_TV: logits_TV,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.vocab_size = vocab_size
        self.built_in = built_in
        self.gather = gather

    def forward(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return the summed loss, fp32 (fp64 for fp64).

        Communication: that of `gather` in training, that of `built_in` in evaluation.
        Raises: ConfigError when the function returns anything but a scalar with a gradient.
        """
        if not self.training:
            summed: Tensor = self.built_in(logits_TV, labels_T)
            return summed
        found = self.loss(self.gather(logits_TV)[:, : self.vocab_size], labels_T)
        if not isinstance(found, Tensor):
            raise _custom_loss_error(f"a {type(found).__name__}")
        if found.dim() != 0:
            raise _custom_loss_error(f"a tensor of shape {list(found.shape)}")
        if not found.requires_grad:
            raise _custom_loss_error("a tensor without a gradient")
        return found.to(accumulate_dtype(logits_TV.dtype))


def _custom_loss_error(found: str) -> ConfigError:
    rule = "return the sum of the tokens' losses, a scalar that is computed from the logits"
    return ConfigError([f"the custom loss function returned {found}; {rule}"])


class LossHead(nn.Module):
    """norm -> head_in -> projection -> soft cap (if configured) -> loss.

    Replaceable submodules: `head_in` (the input of the projection) and `cross_entropy`. `weight` is the parameter of
    the word embedding if the head is tied and both are in this part of the model.
    """

    def __init__(
        self, config: ModelConfig, tied_weight: nn.Parameter | None, loss_terms: LossTerms = CROSS_ENTROPY_ALONE
    ) -> None:
        super().__init__()
        self.norm = build_norm(config)
        self.head_in = nn.Identity()
        if tied_weight is None:
            tied_weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size))
        self.weight = tied_weight
        self.softcap = config.head_softcap
        self.cross_entropy: CrossEntropy | CustomLoss = CrossEntropy(config.vocab_size, loss_terms)

    def logits(self, hidden_SBH: Tensor) -> Tensor:
        """Return the logits over this part's vocabulary. Shapes: hidden [S, B, H]; result [S, B, V]."""
        return self._logits(ResidualStream(hidden_SBH))

    def _logits(self, stream: ResidualStream) -> Tensor:
        normed_SBH, _ = self.norm(stream)
        logits_SBV = linear(self.head_in(normed_SBH), self.weight)
        return softcap_(logits_SBV, self.softcap) if self.softcap else logits_SBV

    def forward(self, stream: ResidualStream, labels_SB: Tensor) -> Tensor:
        """Return the summed loss. Shapes: stream [S, B, H]; labels [S, B], -100 where ignored; result scalar."""
        return self.cross_entropy(self._logits(stream).flatten(0, 1), labels_SB.flatten())
