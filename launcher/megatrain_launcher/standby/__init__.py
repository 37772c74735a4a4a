"""Standby workers: a process that has imported torch and the trainer forks a worker within milliseconds.

The standby server has one thread and never runs a worker's module itself, so that forking is safe. Importing this
package loads nothing; `__main__` is the standby server's program, `fork_server` its loop, and `client` the executor's
side.
"""
