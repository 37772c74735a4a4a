"""Pictures: shards and their index, producers that decode them, and the source that asks producers by sample number.

A picture is an array of patches, uint8 [patches, patch * patch * 3]: RGB, the patches of a square picture in row-major
order. The model normalizes the values. This package loads no torch, and loads DALI or Pillow only to make a decoder.
"""
