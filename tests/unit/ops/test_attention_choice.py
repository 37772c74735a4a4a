"""The table of attention kernels: which kernel each case gets, and why the others were rejected."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from megatrain.contracts.errors import ConfigError
from megatrain.ops.attention import AttentionPattern, softmax_attention
from megatrain.ops.attention_choice import AttentionCase, Backend, DeviceKind, choose_attention
from tests.helpers.kernels import draw

BF16 = torch.bfloat16
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


def gpu(capability: tuple[int, int] = HOPPER, dtype: torch.dtype = BF16, head_dim: int = 128, *, window: bool = False,
        documents: bool = False, refused: tuple[Backend, ...] = ()) -> AttentionCase:  # fmt: skip
    return AttentionCase("cuda", capability, dtype, head_dim, window, documents, frozenset(refused))


CHOICES: list[tuple[AttentionCase, Backend, str]] = [
    (gpu(), Backend.CUDNN, ""),
    (gpu(dtype=torch.float16), Backend.CUDNN, ""),
    (gpu(refused=(Backend.CUDNN,)), Backend.FLASH, "not cudnn: this torch does not support it"),
    (gpu(AMPERE), Backend.FLASH, "not cudnn: it needs compute capability 9.0, and the GPU has 8.0"),
    (gpu(window=True), Backend.FLASH, "not cudnn: it has no kernel for a sliding window"),
    (gpu(documents=True), Backend.FLASH, "not cudnn: torch cannot pass document boundaries to it"),
    (gpu(window=True, documents=True), Backend.FLASH, "not cudnn: it has no kernel for a sliding window"),
    (gpu(head_dim=256), Backend.FLASH, "multiple of 8 up to 128, not 256"),
    (gpu(head_dim=100), Backend.EFFICIENT, "not flash: it needs a head dim that is a multiple of 8 up to 256"),
    (gpu(dtype=torch.float32), Backend.EFFICIENT, "not flash: it needs bf16 or fp16, not torch.float32"),
    (gpu(TURING), Backend.EFFICIENT, "not flash: it needs compute capability 8.0, and the GPU has 7.5"),
    (gpu(TURING, window=True), Backend.DENSE, "not efficient: it needs a full mask for a window"),
    (gpu(dtype=torch.float32, documents=True), Backend.DENSE, "not efficient: it needs a full mask for documents"),
    (gpu(dtype=torch.float64), Backend.DENSE, "not efficient: it has no kernel for torch.float64"),
    (replace(gpu(), has_softcap=True), Backend.BLOCKS, "not flash: it does not support a soft cap"),
    (
        replace(gpu(dtype=torch.float64, documents=True), has_softcap=True),
        Backend.BLOCKS,
        "it does not support a soft cap",
    ),
    (AttentionCase("cpu", (0, 0), BF16, 64, True, True), Backend.CPU, "not flash: the device is cpu"),
    (AttentionCase("cpu", (0, 0), BF16, 64, True, True, has_softcap=True), Backend.BLOCKS, "not flash: the device"),
]
"""Case, the chosen kernel, and a part of the reason."""


def test_first_kernel_that_supports_the_case_is_chosen() -> None:
    for case, backend, reason in CHOICES:
        choice = choose_attention(case)
        assert choice.backend is backend, case
        assert reason in choice.reason, case
        is_slow = backend in (Backend.BLOCKS, Backend.DENSE)
        assert choice.is_fallback == (case.device_type == "cuda" and is_slow), case


def test_kernel_is_chosen_by_name() -> None:
    assert choose_attention(gpu(), "flash").backend is Backend.FLASH
    assert choose_attention(gpu(), "dense").is_fallback
    with pytest.raises(
        ConfigError, match=r'kernels\.attention="cudnn" does not support this model: not cudnn: it has no kernel'
    ):
        choose_attention(gpu(window=True), "cudnn")


def test_cpu_ignores_the_kernel_chosen_for_gpus() -> None:
    assert choose_attention(AttentionCase("cpu", (0, 0), BF16, 64, False, False), "flash").backend is Backend.CPU


def slow_pattern(**options: bool) -> AttentionPattern:
    """Return a case that an old GPU computes slowly, chosen for it whatever the present device is."""
    return AttentionPattern(6, 3, device_kind=DeviceKind("cuda", TURING), **options)


def test_a_slow_path_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    q = draw(6, 1, 2, 56)  # No other test of this process uses such heads.
    with caplog.at_level(logging.INFO, logger="megatrain.ops.attention"):
        for _ in range(3):
            softmax_attention(q, q, q, slow_pattern())

    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "attention: dense (not cudnn: it needs compute capability 9.0" in caplog.text


def test_slow_path_is_an_error_if_kernels_are_strict() -> None:
    q = draw(6, 1, 2, 8)
    with pytest.raises(
        ConfigError, match=r"kernels\.strict=true, and attention would write out all S \* S scores: not cudnn"
    ):
        softmax_attention(q, q, q, slow_pattern(is_strict=True))
