"""Writes Hugging Face model directories (safetensors, config.json, tokenizer) from our parameters, and reads them.

It streams, on the CPU, without the `transformers` package. It does not depend on where our parameters are stored.
"""

from megatrain.hf.export import Dtype, ExportReport, export_model
from megatrain.hf.model_directory import HfModel, open_model
from megatrain.hf.tokenizer_files import TokenizerFile

__all__ = ["Dtype", "ExportReport", "HfModel", "TokenizerFile", "export_model", "open_model"]
