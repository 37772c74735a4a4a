"""Jobs under fault use the default leases and silence limits, unless the test is about one of them."""

from __future__ import annotations

import ast

from tests.helpers.source_tree import nodes, python_files, relative

SETTINGS = {
    "hang_factor",
    "hang_floor_s",
    "join_timeout_s",
    "last_call_s",
    "lease_renew_s",
    "lease_ttl_s",
    "step_timeout_s",
    "stop_timeout_s",
}
EXCEPTIONS = {
    "tests/faults/hosts/test_executor_alone.py": "an executor without etcd, before and after its lease ends",
    "tests/faults/hosts/test_frozen_hosts.py": "a host that is frozen for longer than its lease, and one for less",
    "tests/faults/hosts/test_kernel_log_errors.py": "a round that does not wait for the evicted host",
    "tests/faults/hosts/test_host_faults.py": "hosts whose lease ends, that join too late, or do not stop in time",
    "tests/faults/outages/test_slow_producers.py": "producers that are slower than the longest silence",
    "tests/faults/outages/test_slow_storage.py": "storage that is slower than the longest silence",
    "tests/faults/ranks/test_culprit_agrees.py": "many hangs, each found after its silence",
    "tests/faults/ranks/test_cut_link.py": "the limit of an exchange on a cut link",
    "tests/faults/ranks/test_hang_sites.py": "many hangs, each found after its silence",
    "tests/helpers/outage_checks.py": "outages that are longer or shorter than a lease",
    "tests/helpers/outage_job.py": "outages in which an exchange must not fail before the host does",
}
"""Files that change such a setting, and the lease or silence limit that they test."""


def test_launched_jobs_keep_the_shipped_leases_and_silences() -> None:
    found = {
        relative(path)
        for path in python_files("tests/faults", "tests/helpers")
        for table in nodes(path, ast.Dict)
        if any(isinstance(key, ast.Constant) and key.value in SETTINGS for key in table.keys)
    }
    assert sorted(found - set(EXCEPTIONS)) == [], "use the default values, or name the lease that the test is about"
    assert sorted(set(EXCEPTIONS) - found) == [], "an unneeded exception"
