"""Parallelism over plain modules: tensor and sequence parallel, pipeline, data parallel with sharded optimizer state.

Nothing here uses a particular model class. The tensor plan finds parameters and submodules by their names, and a
pipeline chunk is any module that is called as chunk(x, context, labels).
"""
