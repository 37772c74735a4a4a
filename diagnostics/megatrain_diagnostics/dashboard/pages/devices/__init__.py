"""What the GPUs and network links of a host say."""
