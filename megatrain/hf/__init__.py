"""Hugging Face model directories (safetensors, config.json, tokenizer), written from our parameters and read into them.

Streaming, on the CPU, without the `transformers` package. Where parameters come from and go to is not known here.
"""

from megatrain.hf.export import Dtype, ExportReport, export_model
from megatrain.hf.model_directory import HfModel, open_model
from megatrain.hf.tokenizer_files import TokenizerFile

__all__ = ["Dtype", "ExportReport", "HfModel", "TokenizerFile", "export_model", "open_model"]
