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
    ("requirement", "found", "outcome"),
    [("all", True, None), ("", True, None), ("all", False, pytest.fail.Exception), ("", False, pytest.skip.Exception)],
)
def test_only_a_missing_part_fails_or_skips(
    requirement: str, found: bool, outcome: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_REQUIRE", requirement)
    raised: type[BaseException] | None = None
    try:
        require("etcd", found=found, reason="no etcd on PATH")
    except (pytest.fail.Exception, pytest.skip.Exception) as error:
        raised = type(error)
    assert raised is outcome


def test_missing_part_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRAIN_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="etcd: no etcd on PATH"):
        require("etcd", found=False, reason="no etcd on PATH")


def test_missing_part_fails_where_everything_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_REQUIRE", "all")
    with pytest.raises(pytest.fail.Exception, match=r"etcd is required here .* no etcd on PATH"):
        require("etcd", found=False, reason="no etcd on PATH")
