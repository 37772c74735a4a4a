"""megatrain: pretraining of large language models with 3D parallelism, recovery and diagnosis.

Importing the package loads nothing else: no torch, no numpy, no CUDA. A name of the Python API is loaded when it
is first used. __init__.pyi has the types; docs/guides/python.md describes the API.
"""

__version__ = "0.1.0"

_MODULES = {
    "Callback": "megatrain.training.extensions",
    "EvaluationReport": "megatrain.reporting.report",
    "LoadedModel": "megatrain.inference.loaded_model",
    "RunRecord": "megatrain.run_record",
    "StepReport": "megatrain.reporting.report",
    "Trainer": "megatrain.trainer",
    "load": "megatrain.inference.loaded_model",
    "read_run": "megatrain.run_record",
}
"""The module that defines each name of the Python API."""

__all__ = [
    "Callback",
    "EvaluationReport",
    "LoadedModel",
    "RunRecord",
    "StepReport",
    "Trainer",
    "__version__",
    "load",
    "read_run",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # not at the top: importing importlib takes time, and most programs that import megatrain do not need it
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
