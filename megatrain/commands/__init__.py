"""The verbs of the `megatrain` command, one module each. They load torch only where they need it."""
