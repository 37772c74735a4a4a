"""megatrain: pretraining of large language models with 3D parallelism, recovery and diagnosis.

Importing the package loads nothing else: no torch, no numpy, no CUDA.
"""

__version__ = "0.1.0"
