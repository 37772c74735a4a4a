"""Health checks: those that a host must pass before it takes part, and pair tests, which find slow hosts and links.

`checks.run_checks(context) -> CheckReport` checks one host; `pairs.pairs`, `pair_test.run_pair` and `pairs.judge_pairs`
are for the timed all-reduces between hosts. The modules that a launcher imports do not load torch: code that needs
torch or the GPU's driver runs in child processes with deadlines, because both can hang in the kernel forever.
"""
