"""Measurements, side by side with a peer where there is one. `make bench` runs them all, alone on the machine.

`python -m benchmarks [NAME ...] [--write]`: with --write, the results go to docs/benchmarks.
"""
