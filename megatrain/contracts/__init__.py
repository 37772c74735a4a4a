"""The common definitions of megatrain's programs: file formats, names, exit codes and error classes.

Standard library only. Every format is versioned JSON or a fixed binary layout, never pickle, so that the trainer, the
launcher and the diagnostics can be built, killed and replaced independently.
"""
