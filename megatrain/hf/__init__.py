"""Export and import of Hugging Face model directories: safetensors, config.json and tokenizer.

Both stream on the CPU, without the `transformers` package, and do not depend on where the parameters are stored.
"""

from megatrain.hf.export import Dtype, ExportReport, export_model
from megatrain.hf.model_directory import HfModel, open_model
from megatrain.hf.tokenizer_files import TokenizerFile

__all__ = ["Dtype", "ExportReport", "HfModel", "TokenizerFile", "export_model", "open_model"]
