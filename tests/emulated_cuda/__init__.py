"""CUDA kernels executed on the CPU, so that csrc/ is tested without a GPU."""
