"""Standby workers: a small process that has torch and the trainer imported, and forks a worker in milliseconds.

The one idea: fork instead of start, from a process with one thread that never runs anything itself. Importing this
package loads nothing; `server` is the executor's side, `__main__` the process.
"""
