"""Health checks: what a host must pass before it takes part, and the test which tells a slow host from its partner.

`checks.run_checks(context) -> CheckReport` for one host; `pairs.pairs`, `pair_test.run_pair` and `pairs.judge_pairs`
for the timed all-reduce between hosts. Nothing here that a launcher imports loads torch: what needs torch or the GPU's
driver runs in child processes with deadlines, because either can hang in the kernel for good.
"""
