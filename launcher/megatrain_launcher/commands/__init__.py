"""The verbs that the launcher adds to the `megatrain` command, one module each; to look and to ask loads no torch."""
