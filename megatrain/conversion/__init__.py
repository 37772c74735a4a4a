"""Converts checkpoints offline: to another layout, and to and from Hugging Face model directories. CPU only.

Conversion streams: at a time, memory holds plans of up to 64 ranks and several items, or a few parameters, or the
tensors of one file of an export.
"""
