"""Converts checkpoints offline: to another layout, and to and from Hugging Face model directories. CPU only.

Conversion streams. To another layout, memory holds the plans of up to 64 ranks and several items at a time; an import
holds a few parameters, and an export the tensors of one file and two parameters.
"""
