"""Rules on csrc/ that no compiler checks: no name in two files, launch bounds for each kernel, no atomics."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.helpers.source_tree import ROOT

KERNELS = {path.name: path.read_text() for path in sorted((ROOT / "csrc" / "kernels").glob("*.cu*"))}
DEVICE_FUNCTION = re.compile(r"^(?:__device__|template).*?\b(\w+)\(([^)]*)\)\s*\{", re.MULTILINE)


def test_every_kernel_has_its_launch_bounds() -> None:
    kernels = [
        (name, line) for name, text in KERNELS.items() for line in re.findall(r"^.*__global__.*$", text, re.MULTILINE)
    ]

    assert len(kernels) > 20
    assert [kernel for kernel in kernels if "__launch_bounds__" not in kernel[1]] == []


def test_no_kernel_uses_atomics() -> None:
    assert [name for name, text in KERNELS.items() if re.search(r"\batomic\w+\(|red\.|atom\.", text)] == []


def test_each_kernel_name_is_one_function() -> None:
    # Inline functions with one signature in two headers are one symbol to the linker, which keeps one of the bodies.
    places = defaultdict(set)
    for name, text in KERNELS.items():
        for function, arguments in DEVICE_FUNCTION.findall(text):
            places[function, re.sub(r"\s*\w+(,|$)", r"\1", arguments)].add(name)

    assert places
    assert {key: files for key, files in places.items() if len(files) > 1} == {}
