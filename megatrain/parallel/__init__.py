"""Parallelism over plain modules: tensor and sequence parallel, pipeline, data parallel with sharded optimizer state.

Nothing here knows a particular model class; a plan is a table from names to styles, and a pipeline chunk is any module
called as chunk(x, context, labels).
"""
