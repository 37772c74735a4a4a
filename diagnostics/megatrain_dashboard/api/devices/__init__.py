"""The readings of the GPUs and network links of a host."""
