"""From text to micro-batches: corpus, tokenizer, token files, sample order and the reader.

Loads no torch.
"""
