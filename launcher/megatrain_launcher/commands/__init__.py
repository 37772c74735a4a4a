"""The launcher's subcommands of `megatrain`, one module each. Those that only read or send requests load no torch."""
