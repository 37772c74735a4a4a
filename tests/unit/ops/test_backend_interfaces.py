"""Adapters and stand-ins of NVIDIA's packages have the packages' own signatures, as in their sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatrain.ops.apex_norm import ApexNorms, PlannedApex
from megatrain.ops.normalization import layer_norm, rms_norm
from megatrain.ops.optional_backends import TransformerEngine
from megatrain.ops.transformer_engine_linear import TransformerEngineLinear
from tests.helpers import apex_stand_in, transformer_engine_stand_in
from tests.helpers.backend_interfaces import (
    READ,
    VERSIONS,
    Signatures,
    download,
    read_interface,
    recorded,
    signature,
    wheel_sources,
)
from tests.helpers.require import require

STAND_INS: dict[str, ModuleType] = {"apex": apex_stand_in, "transformer_engine": transformer_engine_stand_in}
RECORDED = [(package, version) for package, versions in recorded().items() for version in versions]


def of_stand_in(package: str, name: str) -> list[inspect.Parameter]:
    """Return the parameters of the stand-in's function with this name, without annotations and without self."""
    found: Any = STAND_INS[package]
    for part in name.split("."):
        found = getattr(found, part)
    parameters = [
        one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(found).parameters.values()
    ]
    return parameters[1:] if name.endswith(".forward") else parameters


def checked(call: Callable[..., Any], parameters: str) -> Callable[..., Any]:
    """Return `call`, which fails unless its arguments match the parameters."""
    bound = signature(parameters)

    def checking(*args: Any, **kwargs: Any) -> Any:
        bound.bind(*args, **kwargs)
        return call(*args, **kwargs)

    return checking


@pytest.mark.parametrize(("package", "version"), RECORDED)
def test_stand_in_has_the_signatures_of_the_package(package: str, version: str) -> None:
    for name, parameters in recorded()[package][version].items():
        theirs, ours = list(signature(parameters).parameters.values()), of_stand_in(package, name)

        assert ours == theirs[: len(ours)], name
        assert all(one.default is not inspect.Parameter.empty for one in theirs[len(ours) :]), name


@pytest.mark.parametrize("version", recorded()["transformer_engine"])
def test_adapter_calls_transformer_engine_as_it_is(version: str) -> None:
    call_with(recorded()["transformer_engine"][version])


def call_with(signatures: Signatures) -> None:
    """Multiply by the adapter, which calls a stand-in with these signatures."""

    class Linear(transformer_engine_stand_in.Linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            signature(signatures["Linear"]).bind(*args, **kwargs)
            super().__init__(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            signature(signatures["Linear.forward"]).bind(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    autocast = checked(transformer_engine_stand_in.autocast, signatures["autocast"])
    scaling = checked(transformer_engine_stand_in.Float8CurrentScaling, signatures["Float8CurrentScaling"])
    engine = TransformerEngine(
        cast("ModuleType", SimpleNamespace(Linear=Linear, autocast=autocast)),
        cast("ModuleType", SimpleNamespace(Float8CurrentScaling=scaling)),
    )
    x, weight = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bfloat16)

    assert torch.equal(TransformerEngineLinear(engine)(x, weight, x[:, 0]), torch.full_like(x[:, :16], 33.0))


@pytest.mark.parametrize("version", recorded()["apex"])
def test_adapter_calls_apex_as_it_is(version: str) -> None:
    calls = {
        name: checked(getattr(apex_stand_in, name), parameters)
        for name, parameters in recorded()["apex"][version].items()
    }
    norms = ApexNorms(cast("ModuleType", SimpleNamespace(**calls)))
    x, weight = torch.randn(4, 8), torch.ones(8)

    assert norms.rms_norm(x, weight, 1e-5)[0].shape == x.shape
    assert norms.layer_norm(x, weight, weight, 1e-5, x)[0].shape == x.shape


Norm = Callable[..., tuple[Tensor, Tensor]]


def saved_shapes(norm: Norm, *tensors: Tensor) -> tuple[Tensor, list[torch.Size]]:
    """Return the output of a norm, and the shapes of the tensors that it saves for backward."""
    shapes: list[torch.Size] = []

    def save(saved: Tensor) -> Tensor:
        shapes.append(saved.shape)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved):
        return norm(*tensors, 1e-5)[0], shapes


def test_planned_apex_computes_and_saves_as_our_norms_do() -> None:
    planned = ApexNorms(PlannedApex())
    x, *parameters = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (8,), (8,)))
    norms: list[tuple[Norm, Norm, int]] = [(planned.rms_norm, rms_norm, 1), (planned.layer_norm, layer_norm, 2)]
    for of_apex, ours, num_parameters in norms:
        found, expected = (saved_shapes(norm, x, *parameters[:num_parameters]) for norm in (of_apex, ours))

        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]


PACKAGE = {
    "transformer_engine/pytorch/__init__.py": (
        "from transformer_engine.pytorch.module import Linear\nfrom .quantization import fp8_scope as autocast\n"
    ),
    "transformer_engine/pytorch/module/__init__.py": "from .linear import Linear\n",
    "transformer_engine/pytorch/module/linear.py": (
        "class Linear(Base):\n"
        "    def __init__(self, rows: int, device: str = 'cuda'):\n        pass\n"
        "    def forward(self, inp, is_first: bool | None = None):\n        pass\n"
    ),
    "transformer_engine/pytorch/quantization.py": (
        "@contextmanager\ndef fp8_scope(enabled: bool = True, recipe=default()):\n    yield\n"
    ),
    "transformer_engine/common/recipe/__init__.py": (
        "@dataclass()\nclass Float8CurrentScaling(Recipe):\n    power: bool = os.getenv('P')\n    dpa: bool = False\n"
    ),
}


def test_signatures_are_read_through_imports() -> None:
    assert read_interface(PACKAGE.get) == {
        "Linear": "rows, device='cuda'",
        "Linear.forward": "inp, is_first=None",
        "autocast": "enabled=True, recipe=...",
        "Float8CurrentScaling": "power=..., dpa=False",
    }


@pytest.mark.parametrize("path", PACKAGE)
def test_name_that_is_gone_is_reported(path: str) -> None:
    with pytest.raises(LookupError):
        read_interface({**PACKAGE, path: "pass\n"}.get)


@pytest.mark.slow
@pytest.mark.parametrize("version", [*VERSIONS, ""], ids=[*VERSIONS, "newest"])
def test_wheel_has_the_recorded_signatures(version: str, tmp_path: Path) -> None:
    try:
        wheel = download(version, tmp_path)
    except OSError as error:
        require("package-index", found=False, reason=str(error))
    found = read_interface(wheel_sources(wheel))

    assert found.keys() == {name for names in READ.values() for name in names}
    call_with(found)
    if version:
        assert found == recorded()["transformer_engine"][version], "run tests.helpers.backend_interfaces"
