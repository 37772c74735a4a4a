"""CUDA kernels carried out by the processor, so that what csrc/ computes is tested where there is no GPU."""
