"""From text to microbatches: corpus, tokenizer, token files, sample order and the reader.

Building and inspecting data (`corpus`, `tokenizer`, `indexed`, `build`, `summary`) loads no torch; only `reader` does.
"""
