"""Measurements, compared with a peer where there is one. `make bench` runs all of them; nothing else may run then.

`python -m benchmarks [NAME ...] [--write]`: with --write, the results are written to docs/benchmarks.
"""
