"""`megatrain.load`: a whole model on one device, from a checkpoint of any layout or from a Hugging Face directory.

Shapes: S sequence, B samples, V vocabulary without padding, P patches, C bytes of a patch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import checked_content
from megatrain.checkpoint.find import choose_checkpoint
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_NAME
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import EMA, MASTER
from megatrain.config.model import ModelConfig
from megatrain.config.pictures import patch_width
from megatrain.contracts.errors import CheckpointError, ConfigError, DataError
from megatrain.conversion.software import job_config
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, parse_tokenizer
from megatrain.hf import HfModel, open_model
from megatrain.inference.generation import Sampling, draw_tokens
from megatrain.model import PatchRows, TokenContext, Transformer
from megatrain.ops.precision import DTYPES

HF_CONFIG_NAME = "config.json"
"""A Hugging Face directory has this file, and no run or checkpoint has it."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A whole model in one process, without dropout. `step`: the steps it was trained; 0 for a Hugging Face directory.

    config: the section [model]. read_tokenizer: returns the tokenizer.
    """

    model: Transformer
    config: ModelConfig
    step: int
    device: torch.device
    read_tokenizer: Callable[[], Tokenizer]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that is stored with the model.

        Raises: DataError when there is none, or the tokenizers library is absent; CheckpointError when it is damaged.
        """
        return self.read_tokenizer()

    def logits(self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]], patches: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each of `tokens`.

        patches: of the picture of each sample, for a model with pictures (data/patches.py::patchify). They take the
        place of the first P tokens, whose values do not matter. None: the samples are text only.
        Shapes: tokens [S] or [B, S], with S at most model.seq_len; patches uint8 [P, C] or [B, P, C]; result [S, V] or
        [B, S, V], fp32 (fp64 for fp64), on the model's device.
        Raises: DataError when tokens or patches have another form, or tokens are not in the vocabulary.
        """
        found = self._checked(tokens)
        pictures = self._checked_patches(found, patches)
        return self._logits(found, pictures) if found.dim() == 2 else self._logits(found[None], pictures)[0]

    def generate(
        self,
        prompt: str = "",
        patches: Tensor | None = None,
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return the text after `prompt`, as `megatrain sample` does with the same options. "" starts a document.

        patches: of a picture before the prompt, see `tokens_after`.
        Raises: ConfigError for values out of range; DataError for patches of another form; DataError and
        CheckpointError, see `tokenizer`.
        """
        sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
        return self.tokenizer.decode(list(self.tokens_after(self.tokenizer.encode(prompt), sampling, patches)))

    def tokens_after(self, prompt: Sequence[int], sampling: Sampling, patches: Tensor | None = None) -> Iterator[int]:
        """Yield tokens one by one, until the end-of-document token or max_tokens. An empty prompt starts a document.

        patches: of a picture before the prompt, which then starts a document, as captions in training do. If the text
        becomes longer than the model's context, its first tokens are left out, and the picture stays. Shapes: uint8
        [P, C].
        Raises: DataError for an empty prompt when the tokenizer names no end-of-document token, and for patches of
        another form.
        """
        pictures = self._checked_patches(torch.zeros(self.config.seq_len), patches)
        tokenizer = self.tokenizer
        end = tokenizer.eod_id if tokenizer.end else None
        next_logits = partial(self._next_logits, pictures)
        starts_document = pictures is not None or not prompt
        first = [tokenizer.eod_id, *prompt] if starts_document else list(prompt)
        yield from draw_tokens(next_logits, first, end, sampling)

    def _next_logits(self, pictures: PatchRows | None, tokens: Sequence[int]) -> Tensor:
        num_patches = 0 if pictures is None else len(pictures.patches_PKC)
        context = [0] * num_patches + list(tokens[num_patches - self.config.seq_len :])
        return self._logits(torch.tensor([context], device=self.device), pictures, last_only=True)[0, 0].cpu()

    def _logits(self, tokens_BS: Tensor, pictures: PatchRows | None = None, *, last_only: bool = False) -> Tensor:
        num_samples, seq_len = tokens_BS.shape
        context = TokenContext(torch.arange(num_samples, device=self.device), seq_len, pictures=pictures)
        assert self.model.loss_head is not None
        with torch.no_grad():
            hidden_SBH = self.model.hidden(tokens_BS.t().contiguous(), context)
            logits_SBV = self.model.loss_head.logits(hidden_SBH[-1:] if last_only else hidden_SBH)
        logits_BSV = logits_SBV[..., : self.config.vocab_size].transpose(0, 1)
        return logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()

    def _checked_patches(self, tokens: Tensor, patches: Tensor | None) -> PatchRows | None:
        """Return the patches of the pictures of `tokens`, [S] or [B, S], on the model's device. Raises: DataError."""
        if patches is None:
            return None
        if not self.config.has_pictures:
            raise DataError("the model has no pictures (model.picture_size=0), and patches were given; leave them out")
        shape = [*tokens.shape[:-1], self.config.num_patches, patch_width(self.config)]
        if list(patches.shape) != shape or patches.dtype != torch.uint8:
            found = f"{list(patches.shape)} of {patches.dtype}"
            raise DataError(f"the patches are {found}; give patches of shape {shape} and type uint8")
        if tokens.shape[-1] <= self.config.num_patches:
            raise DataError(
                f"{tokens.shape[-1]} tokens in a sequence whose first {self.config.num_patches} rows are patches; give "
                "at least one more"
            )
        patches_BPC = patches if patches.dim() == 3 else patches[None]
        return PatchRows.of_all(patches_BPC.transpose(0, 1).to(self.device))

    def _checked(self, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return the tokens as a tensor on the model's device. Raises: DataError."""
        rule = "give integers of shape [S] or [B, S]"
        try:
            found = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"tokens cannot be made a tensor ({error}); {rule}") from error
        is_whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
        if found.dim() not in (1, 2) or found.numel() == 0 or not is_whole:
            raise DataError(f"tokens have shape {list(found.shape)} and type {found.dtype}; {rule}")
        seq_len, vocab_size = self.config.seq_len, self.config.vocab_size
        if found.shape[-1] > seq_len:
            raise DataError(
                f"{found.shape[-1]} tokens in a sequence, and model.seq_len={seq_len}; give at most {seq_len}"
            )
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= vocab_size:
            wrong = least if least < 0 else most
            raise DataError(
                f"token {wrong} is not in the vocabulary of this model (model.vocab_size={vocab_size}); use the "
                "tokenizer that it was trained with"
            )
        return found.to(self.device, torch.int64)


def load(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    device: str = "auto",
    dtype: str = "fp32",
    ema: bool = False,
) -> LoadedModel:
    """Load a model from a run, a checkpoint (a path or a URL), or a Hugging Face directory.

    For a run, its newest checkpoint without known damage is loaded, or that of `step`. device: "auto" (a GPU if there
    is one), "cpu", "cuda" or "cuda:1". dtype: the dtype of the weights, "fp32", "bf16" or "fp64". ema: take the moving
    average of the weights (optimizer.ema_decay).
    Raises: ConfigError for a device or a dtype that is not available; CheckpointError naming the path or the file.
    """
    text = os.fspath(path)
    chosen_device, chosen_dtype = choose_device(device), _chosen_dtype(dtype)
    if "://" not in text and (Path(text) / HF_CONFIG_NAME).is_file():
        if step is not None or ema:
            given = "ema=True" if ema else f"step={step}"
            raise CheckpointError(
                f"{text} with {given}: a Hugging Face directory has neither steps nor averages; leave it out"
            )
        return load_huggingface(Path(text), chosen_device, chosen_dtype)
    try:
        checkpoint, notes = choose_checkpoint(text, step)
    except CheckpointError as error:
        if "://" in text or not Path(text).is_dir() or step is not None:
            raise
        raise CheckpointError(f"{error}; a Hugging Face directory would have a file {HF_CONFIG_NAME}") from error
    for note in notes:
        _logger.warning(note)
    kind = EMA if ema else MASTER
    return load_checkpoint(checkpoint, chosen_device, chosen_dtype, kind=kind, needs_tokenizer=False)


def load_checkpoint(
    checkpoint: Location,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    kind: str = MASTER,
    needs_tokenizer: bool = True,
) -> LoadedModel:
    """Load a checkpoint of any layout as one model.

    kind: the kind of state that is read as weights, MASTER or EMA. needs_tokenizer: read the tokenizer before the
    weights, which take longer.
    Raises: CheckpointError or DataError, which name the file.
    """
    manifest = read_manifest(checkpoint)
    config = job_config(manifest, checkpoint).model
    read_tokenizer = cache(partial(_stored_tokenizer, checkpoint, manifest))
    if needs_tokenizer:
        read_tokenizer()
    reader = ParameterReader(checkpoint, manifest, kept_bytes=0)  # each parameter is read once
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = reader.read_parameter(name, kind)
            if stored.shape != parameter.shape:
                raise CheckpointError(
                    f"{checkpoint}: {name} has shape {tuple(stored.shape)}, but its configuration requires "
                    f"{tuple(parameter.shape)}; the manifest belongs to another checkpoint"
                )
            parameter.copy_(stored)
    return LoadedModel(model.to(device).eval(), config, manifest.step, device, read_tokenizer)


def load_huggingface(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a Hugging Face directory. Raises: CheckpointError, which names the file and the key or tensor."""
    opened = open_model(directory)
    model = Transformer(opened.model).to(dtype)
    with torch.no_grad():
        for name, stored in opened.parameters():
            model.get_parameter(name).copy_(stored)
    return LoadedModel(model.to(device).eval(), opened.model, 0, device, cache(partial(_hf_tokenizer, opened)))


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto": a GPU if there is one.

    Raises: ConfigError when the name is not a device, or torch finds no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError([f'device={name!r} is not a device that models run on; use "auto", "cpu" or "cuda"'])
    if device.type == "cuda" and not has_cuda:
        raise ConfigError([f"device {name}: torch finds no CUDA device here; use cpu"])
    return device


def _chosen_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError([f"dtype={name!r} is unknown; use one of {', '.join(DTYPES)}"])
    return DTYPES[name]


def _stored_tokenizer(checkpoint: Location, manifest: Manifest) -> Tokenizer:
    def small_file(name: str) -> bytes | None:
        stored, location = manifest.name_of(name), checkpoint / name
        if stored in manifest.files:
            return checked_content(checkpoint, manifest, stored)
        return location.read() if location.exists() else None  # a user added it after the checkpoint was written

    for name in (TOKENIZER_NAME, SENTENCEPIECE_NAME):
        content = small_file(name)
        if content is not None:
            return parse_tokenizer(content, str(checkpoint / name), beside=small_file)
    location = checkpoint / TOKENIZER_NAME
    raise DataError(f"{location} is missing: the job had no data.tokenizer; copy its tokenizer there")


def _hf_tokenizer(opened: HfModel) -> Tokenizer:
    if opened.tokenizer is None:
        raise DataError(
            f"{opened.directory}: has neither {TOKENIZER_NAME} nor {SENTENCEPIECE_NAME}; copy its tokenizer there"
        )
    return load_tokenizer(opened.tokenizer)
