"""The subcommands of the `megatrain` command, one module each. They load torch only if they need it."""
