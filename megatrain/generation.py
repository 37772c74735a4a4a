"""Generates text from a checkpoint on one device, to show what the model has learned.

Every token takes a forward pass over the whole context, which is simple and exact. Serving, with a key-value cache, is
out of scope. Shapes: S sequence, B = 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import checked_content
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.config.config import Config
from megatrain.contracts.checkpoint_files import TOKENIZER_NAME, read_manifest
from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import Manifest
from megatrain.contracts.state_kinds import MASTER
from megatrain.conversion.software import job_config
from megatrain.data.tokenizer import Tokenizer, parse_tokenizer
from megatrain.model import TokenContext, Transformer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0: the most likely token; top_k 0 and top_p 1: no tokens excluded."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A whole model in one process, with its tokenizer and configuration."""

    model: Transformer
    tokenizer: Tokenizer
    config: Config
    step: int
    device: torch.device


def load_model(checkpoint: Location, device: torch.device, kind: str = MASTER) -> LoadedModel:
    """Load a checkpoint of any layout as one model. kind: of the state that is read as weights, MASTER or EMA.

    Raises: CheckpointError or DataError, which name the file.
    """
    manifest = read_manifest(checkpoint)
    config = job_config(manifest, checkpoint)
    tokenizer = _tokenizer(checkpoint, manifest)
    model = Transformer(config.model)
    reader = ParameterReader(checkpoint, manifest, kept_bytes=0)  # each parameter is read once
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = reader.read_parameter(name, kind)
            if stored.shape != parameter.shape:
                raise CheckpointError(
                    f"{checkpoint}: {name} has shape {tuple(stored.shape)}, its configuration asks for "
                    f"{tuple(parameter.shape)}; the manifest belongs to another checkpoint"
                )
            parameter.copy_(stored)
    return LoadedModel(model.to(device).eval(), tokenizer, config, manifest.step, device)


def _tokenizer(checkpoint: Location, manifest: Manifest) -> Tokenizer:
    def small_file(name: str) -> bytes | None:
        stored, location = manifest.name_of(name), checkpoint / name
        if stored in manifest.files:
            return checked_content(checkpoint, manifest, stored)
        return location.read() if location.exists() else None  # a user added it after the checkpoint was written

    content, location = small_file(TOKENIZER_NAME), checkpoint / TOKENIZER_NAME
    if content is None:
        raise DataError(f"{location} is missing: the job had no data.tokenizer; copy its tokenizer.json there")
    return parse_tokenizer(content, str(location), beside=small_file)


def generate(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """Yield tokens one by one, until the end-of-document token or max_tokens. An empty prompt starts a document.

    Raises: DataError for an empty prompt when the tokenizer names no end-of-document token.
    """
    end = loaded.tokenizer.eod_id if loaded.tokenizer.end else None
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt) or [loaded.tokenizer.eod_id]
    for _ in range(sampling.max_tokens):
        context = tokens[-loaded.config.model.seq_len :]
        token = choose_token(_next_logits(loaded, context), sampling, generator)
        if token == end:
            return
        tokens.append(token)
        yield token


def _next_logits(loaded: LoadedModel, tokens: Sequence[int]) -> Tensor:
    tokens_SB = torch.tensor(tokens, device=loaded.device)[:, None]
    context = TokenContext(sample_B=torch.zeros(1, dtype=torch.int64, device=loaded.device), seq_len=len(tokens))
    assert loaded.model.loss_head is not None
    with torch.no_grad():
        hidden_SBH = loaded.model.hidden(tokens_SB, context)
        return loaded.model.loss_head.logits(hidden_SBH[-1:])[0, 0, : loaded.config.model.vocab_size].cpu()


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token id that is drawn as `sampling` says. Shapes: logits [V]."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    scores_V = logits_V.double() / sampling.temperature
    if 0 < sampling.top_k < scores_V.numel():
        scores_V[scores_V < scores_V.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities_V = scores_V.softmax(0)
    if sampling.top_p < 1.0:
        sorted_V, order_V = probabilities_V.sort(descending=True)
        # keep the smallest set that reaches top_p: a token stays while the sum before it is below top_p
        sorted_V[sorted_V.cumsum(0) - sorted_V >= sampling.top_p] = 0.0
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
