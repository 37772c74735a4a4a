"""What the drivers of a host say of its GPUs and of its network interfaces, read without torch."""
