"""Converts a checkpoint of any layout to a Hugging Face model directory, with the checkpoint's tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatrain.checkpoint.checked_files import checked_content
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.checkpoint_files import TOKENIZER_NAME, read_manifest
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.stored_tensors import MASTER
from megatrain.conversion.software import job_config
from megatrain.data.tokenizer import parse_tokenizer
from megatrain.hf import Dtype, ExportReport, TokenizerFile, export_model


def export_hf(
    source: Location,
    output: Path,
    *,
    kind: str = MASTER,
    dtype: Dtype,
    max_shard_bytes: int,
    has_tokenizer: bool,
    end: str,
    is_forced: bool,
) -> ExportReport:
    """Write the master weights of the committed checkpoint `source`, in `dtype`, for transformers.

    `kind`: EMA for the moving average of the weights instead.
    `end`: the tokenizer's token that ends documents; "" finds it.

    Raises: ConfigError for a model that no family expresses; CheckpointError or DataError, which name the file.
    """
    manifest = read_manifest(source)
    return export_model(
        # each parameter is read once
        partial(ParameterReader(source, manifest, kept_bytes=0).read_parameter, kind=kind),
        job_config(manifest, source).model,
        output,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer=_tokenizer(source, manifest, end) if has_tokenizer else None,
        is_forced=is_forced,
    )


def _tokenizer(source: Location, manifest: Manifest, end: str) -> TokenizerFile | None:
    def small_file(name: str) -> bytes | None:
        stored = manifest.name_of(name)
        return checked_content(source, manifest, stored) if stored in manifest.files else None

    content = small_file(TOKENIZER_NAME)
    if content is None:
        return None
    location = str(source / manifest.name_of(TOKENIZER_NAME))
    return TokenizerFile(content, location, parse_tokenizer(content, location, end, small_file).eod_id)
