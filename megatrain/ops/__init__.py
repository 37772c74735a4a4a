"""The operations that take most of a training step. megatrain's own ones have a plain torch form for every device."""
