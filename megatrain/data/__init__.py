"""From text to micro-batches: corpus, tokenizer, token files, sample order and the reader.

This package loads no torch.
"""
