"""The Python API is a short list: package, type stub and list agree, and every name can be imported."""

from __future__ import annotations

import ast

import pytest

import megatrain
from tests.helpers.source_tree import ROOT

PUBLIC = {"Callback", "EvaluationReport", "LoadedModel", "RunRecord", "StepReport", "Trainer", "load", "read_run"}
"""A longer list is a decision: docs/adr/0063-python-api.md."""


def test_the_package_declares_the_types() -> None:
    stub = ast.parse((ROOT / "megatrain" / "__init__.pyi").read_text())
    typed = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed.keys() == PUBLIC
    assert set(megatrain.__all__) == PUBLIC | {"__version__"}
    assert set(dir(megatrain)) >= PUBLIC
    for name, (module, original) in typed.items():
        assert getattr(megatrain, name) is getattr(__import__(str(module), fromlist=[original]), original)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megatrain' has no attribute 'lode'"):
        megatrain.lode  # type: ignore[attr-defined]  # noqa: B018
