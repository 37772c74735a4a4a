"""What pyproject.toml cannot say: which packages belong to the distribution, and what is compiled.

Nothing compiled is needed: where there is no compiler, installing goes on without it, and `megatrain doctor` says so.
"""

from __future__ import annotations

from setuptools import Extension, find_packages, setup

HOST_COPY = Extension(
    "megatrain._host_copy",
    ["csrc/host_copy/stream_copy.c"],
    extra_compile_args=["-O2"],
    optional=True,
)

PACKAGES = [
    *find_packages(include=["megatrain", "megatrain.*"]),
    *find_packages("launcher", include=["megatrain_launcher", "megatrain_launcher.*"]),
    *find_packages("diagnostics", include=["megatrain_diagnostics", "megatrain_diagnostics.*"]),
]

setup(
    packages=PACKAGES,
    package_dir={
        "megatrain_launcher": "launcher/megatrain_launcher",
        "megatrain_diagnostics": "diagnostics/megatrain_diagnostics",
    },
    package_data={
        "megatrain_launcher": ["templates/*"],
        "megatrain_diagnostics": ["dashboard/static/*", "dashboard/static/assets/*"],
    },
    ext_modules=[HOST_COPY],
)
