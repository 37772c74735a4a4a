"""A checkpoint of any layout as a Hugging Face model directory, with the tokenizer that lies in the checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.contracts.checkpoint_files import read_manifest
from megatrain.contracts.location import Location
from megatrain.conversion.software import job_config
from megatrain.data.tokenizer import load_tokenizer
from megatrain.hf import Dtype, ExportReport, TokenizerFile, export_model
from megatrain.hf.tokenizer_files import TOKENIZER_NAME


def export_hf(
    source: Location, output: Path, *, dtype: Dtype, max_shard_bytes: int, has_tokenizer: bool, is_forced: bool
) -> ExportReport:
    """Write the master weights of the committed checkpoint `source`, in `dtype`, for transformers.

    Raises: ConfigError for a model that no family expresses; CheckpointError and DataError naming the file.
    """
    manifest = read_manifest(source)
    model = job_config(manifest, source).model
    reader = ParameterReader(source, manifest)
    with tempfile.TemporaryDirectory(prefix="megatrain-export-") as directory:
        tokenizer = None
        if has_tokenizer and TOKENIZER_NAME in manifest.files:
            path = Path(directory) / TOKENIZER_NAME  # the library reads local files only
            path.write_bytes((source / TOKENIZER_NAME).read())
            tokenizer = TokenizerFile(path, load_tokenizer(path).eod_id)
        return export_model(
            reader.read_parameter,
            model,
            output,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
            is_forced=is_forced,
        )
