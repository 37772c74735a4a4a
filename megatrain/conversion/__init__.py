"""Converts checkpoints offline: to another layout, and to and from Hugging Face model directories. CPU only.

Conversion streams: memory holds one rank's plan and one item, or one parameter, at a time.
"""
