"""The operations that take most of a training step, one file each. Each has a plain torch form for every device."""
