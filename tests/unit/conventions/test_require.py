"""A missing part skips a test on a laptop and fails it in CI."""

from __future__ import annotations

import pytest

from tests.helpers.require import is_required, require


def test_parts_are_required_by_name_or_all() -> None:
    assert is_required("etcd", "") is False
    assert is_required("etcd", "all") is True
    assert is_required("etcd", "chromium,etcd") is True
    assert is_required("etcd", "chromium") is False
    assert is_required("gpu", "all") is False
    assert is_required("apex", "all") is False
    assert is_required("gpu", "gpu") is False
    assert is_required("dali", "all") is False
    assert is_required("dali", "dali") is True


@pytest.mark.parametrize(
    ("requirement", "outcome", "message"),
    [
        ("all", pytest.fail.Exception, r"etcd is required here .* no etcd on PATH"),
        ("", pytest.skip.Exception, "etcd: no etcd on PATH"),
    ],
)
def test_missing_part_fails_where_required_and_else_skips(
    requirement: str, outcome: type[BaseException], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_REQUIRE", requirement)
    require("etcd", found=True, reason="no etcd on PATH")
    with pytest.raises(outcome, match=message):
        require("etcd", found=False, reason="no etcd on PATH")
