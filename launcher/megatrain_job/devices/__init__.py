"""The drivers' readings of a host's GPUs and network interfaces, without torch."""
