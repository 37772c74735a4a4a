"""Standby workers: a small process that has torch and the trainer imported, and forks a worker in milliseconds.

The one idea: fork instead of starting a program, from a process with one thread that never runs a worker's module
itself. Importing this package loads nothing; `__main__` is the standby server's process, `fork_server` its loop, and
`client` the executor's side.
"""
