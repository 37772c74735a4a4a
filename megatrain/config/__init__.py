"""The configuration of a run: strict TOML and `--section.key=value` settings, read into frozen dataclasses.

Every mistake is found before any process group exists, and all are reported together, each with its key, value, rule,
hint and origin. Standard library only, so that the launcher and the diagnostics read the same file.
"""
