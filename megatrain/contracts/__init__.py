"""What the programs of megatrain agree on: file formats, names, exit codes and error classes.

Standard library only. Everything here is versioned JSON or a fixed binary layout, never pickle, so that the
trainer, the launcher and the diagnostics can be built, killed and replaced apart from each other.
"""
