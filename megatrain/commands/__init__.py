"""The verbs of the `megatrain` command, one module each; they load torch only where they train."""
