"""Converts checkpoints offline: to another layout, and to and from Hugging Face model directories. CPU only.

Conversions stream. Memory holds, for another layout, the plans of up to 64 ranks and several items at a time; for an
import, a few parameters; and for an export, the tensors of one file and two parameters.
"""
