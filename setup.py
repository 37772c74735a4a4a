"""What pyproject.toml cannot say: which packages belong to the distribution.

Everything is pure Python, so installing needs no compiler.
"""

from __future__ import annotations

from setuptools import find_packages, setup

setup(packages=find_packages(include=["megatrain", "megatrain.*"]))
