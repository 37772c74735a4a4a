"""Health checks: what a host must pass before it takes part, and the test that distinguishes a slow host from its
partner.

`checks.run_checks(context) -> CheckReport` for one host; `pairs.pairs`, `pair_test.run_pair` and `pairs.judge_pairs`
for the timed all-reduce between hosts. No module here that a launcher imports loads torch: code that needs torch or the
GPU's driver runs in child processes with deadlines, because either can hang in the kernel forever.
"""
