"""From text to micro-batches: corpus, tokenizer, token files, sample order and the reader.

Building and inspecting data (`corpus`, `tokenizer`, `indexed`, `build`, `summary`) loads no torch; only `reader` does.
"""
