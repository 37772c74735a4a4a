"""The operations that take most of a training step. Those of megatrain itself have a plain torch form for every device."""
