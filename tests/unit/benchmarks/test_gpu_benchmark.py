"""The GPU benchmark, as far as it can be tested without a GPU: its cases run, and its peers do the same work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_timing
from benchmarks.gpu_flat_cases import plain_adamw
from benchmarks.gpu_operator_case import OperatorCase, Sizes, compiled
from benchmarks.gpu_operator_cases import cases, products
from benchmarks.gpu_step import (
    PlainLlama,
    PlainNorm,
    host_bound_config,
    idle_share,
    kernel_spans,
    layers_that_fit,
    model_config,
    needed_bytes,
    our_config,
    our_step,
    peer_step,
)
from megatrain.config.checks import check
from megatrain.config.load import load_config
from megatrain.ops.optimizer_step import adamw_
from tests.helpers.forked_program import run_forked
from tests.helpers.source_tree import ROOT

CPU = torch.device("cpu")
SMALL = Sizes(tokens=32, hidden=64, ffn=96, heads=4, kv_heads=2, vocab_size=128, num_weights=64 * 64)
CASES = list(cases(SMALL, CPU))
TINY = {"hidden_size": 64, "ffn_size": 96, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}


# The case of AdamW loads most of torch's compiler; test_plain_adamw_is_ours is quick.
@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=pytest.mark.slow if "AdamW" in one.name else (), id=one.name) for one in CASES],
)
def test_both_sides_of_a_case_run_again_and_again(case: OperatorCase) -> None:
    works = [case.ours()]
    if case.theirs is not None:
        works.append(case.theirs(lambda operation: operation))
    for work in works:
        for _ in range(2):
            work()
    assert case.num_bytes > 0


def test_products_are_those_of_a_layer_and_every_way_runs() -> None:
    found = list(products(SMALL, CPU))
    for _, flops, ways in found:
        assert flops > 0
        for make in ways.values():
            work = make()
            work()
            work()

    # Llama 3 8B: 218,103,808 weights a layer and 525,336,576 of the head, each twice a token
    a_layer = sum(flops for name, flops, _ in products(Sizes(tokens=1), torch.device("meta")) if name != "head")
    assert a_layer == 2 * 218_103_808


def test_the_peer_is_the_same_model() -> None:
    model = model_config(2, seq_len=32, **TINY)
    step, trainer = our_step(our_config(model), CPU)
    ours = sum(
        parameter.numel() for chunk in trainer.rank_model.pipeline.chunks for parameter in chunk.module.parameters()
    )
    trainer.close()
    del step

    assert ours == sum(parameter.numel() for parameter in PlainLlama(model).parameters())


@pytest.mark.slow
def test_both_sides_train() -> None:
    model = model_config(1, seq_len=32, **TINY)
    tokens = torch.randint(0, 128, (33, 2), generator=torch.Generator().manual_seed(0))
    ours, trainer = our_step(our_config(model, 2, optimizer={"lr": 1e-2}), CPU)
    for step in (ours, peer_step(model, CPU, lambda net: net)):
        losses = [step(tokens) for _ in range(3)]
        assert losses[-1] < losses[0]
    trainer.close()


@pytest.mark.slow(kept=["True"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_host_bound_model_trains_with_and_without_graphs(has_graphs: bool) -> None:
    base = load_config(ROOT / "configs" / "gpt_125m.toml", ["--model.seq_len=16", "--model.vocab_size=128"]).config
    small = base.to_dict()
    small["model"] |= {"hidden_size": 64, "num_layers": 1, "num_heads": 4}
    config = host_bound_config(type(base).from_dict(small), cuda_graphs=has_graphs)
    assert check(config, {}, world_size=1) == []
    assert (config.kernels.cuda_graphs, config.batch.micro_batch_size) == (has_graphs, 1)

    step, trainer = our_step(config, CPU)
    tokens = torch.randint(0, 128, (17, config.batch.global_batch_size), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.close()


def test_layers_that_fit_leave_memory_for_activations() -> None:
    expected = {83_750_000_000: 10, 149_200_000_000: 21, 1 << 30: 1}
    assert {memory: layers_that_fit(memory, model_config(1)) for memory in expected} == expected


def test_needed_bytes_are_more_than_weights_and_kept_activations() -> None:
    # 10 layers of Llama 3 8B: 18 bytes for each of 3,231,711,232 weights, and 1.14e9 bytes a layer
    assert needed_bytes(model_config(1), 10) == pytest.approx(
        18 * 3_231_711_232 + 10 * 1.14e9 + 2 * 8192 * 128256, 0.01
    )


def test_idle_is_the_time_in_which_no_kernel_ran() -> None:
    for spans, idle in (
        ([(0.0, 1.0), (1.0, 2.0)], 0.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], 0.0),
        ([(0.0, 1.0), (0.5, 1.0), (2.0, 2.5)], 0.4),
    ):
        assert idle_share(spans) == pytest.approx(idle), spans
    assert idle_share([]) == "not measured: the profiler saw no kernel"


def test_kernels_of_a_profile_are_neither_copies_nor_annotations() -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, device: Any, start: float, *, is_annotation: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=start + 1.0)
        return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=is_annotation)

    events = [
        event("gemm", cuda, 5.0),
        event("norm", cuda, 1.0),
        event("Memcpy HtoD", cuda, 2.0),
        event("cudaLaunchKernel", cpu, 3.0),
        event("Optimizer.step", cuda, 0.0, is_annotation=True),
    ]
    assert kernel_spans(events) == [(1.0, 2.0), (5.0, 6.0)]


def test_the_caches_are_filled_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 5.0

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    class Memory:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: happened.append(name)

    class Scope:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    graph = SimpleNamespace(replay=lambda: happened.append("replay"))
    for name, stand_in in {
        "Stream": Stream, "current_stream": Stream, "Event": Event, "CUDAGraph": lambda: graph, "graph": Scope,
        "stream": Scope, "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(gpu_timing, "_other_memory", Memory)

    assert gpu_timing.seconds_of(lambda: happened.append("work"), repeats=2) == 5e-3
    assert happened == ["work"] * 4 + ["sum", "event", "replay", "event"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "backward" in case.name], ids=lambda case: case.name)
def test_a_compiled_backward_runs_again_and_again(case: OperatorCase, monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend divides forward and backward as the default one does, and generates no code.
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **keys: real(*args, backend="aot_eager_decomp_partition", **keys)
    )
    assert case.theirs is not None
    work = case.theirs(compiled)
    work()
    work()


def test_plain_adamw_is_ours() -> None:
    generator = torch.Generator().manual_seed(0)
    grad, master, exp_avg = (torch.randn(64, generator=generator) for _ in range(3))
    theirs = [grad, master, exp_avg, exp_avg.square(), torch.zeros(64, dtype=torch.bfloat16)]
    ours = [one.clone() for one in theirs]
    plain_adamw(*theirs)
    adamw_(
        *ours, torch.tensor([0, 64]), torch.tensor([True]),
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, num_updates=3, gradient_scale=0.5,
    )  # fmt: skip

    for found, expected in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found, expected)


def test_peer_norm_is_torchs_in_the_type_of_the_residual_stream() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    found = PlainNorm(64)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5).bfloat16())


@pytest.mark.slow
def test_the_compiled_peer_keeps_no_activation_in_fp32() -> None:
    model = model_config(2, seq_len=32, **TINY)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    torch.manual_seed(0)
    net = torch.compile(PlainLlama(model), backend="aot_eager_decomp_partition", dynamic=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    tokens = torch.randint(0, 128, (2, 33))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), torch.autocast("cpu", torch.bfloat16):
        loss = net(tokens[:, :-1], tokens[:, 1:])
    loss.backward()

    large = [one for one in kept if one.numel() >= 2 * 32 * 64 and one.untyped_storage().data_ptr() not in weights]
    assert {one.dtype for one in large} == {torch.bfloat16}


@pytest.mark.slow
def test_offloaded_side_trains_as_the_other_does() -> None:
    model = model_config(3, seq_len=32, **TINY)
    tokens = torch.randint(0, 128, (33, 1), generator=torch.Generator().manual_seed(0))
    losses = []
    for num_offloaded in (0, 2):
        step, trainer = our_step(our_config(model, parallel={"offload_layers": num_offloaded}), CPU)
        losses.append([step(tokens) for _ in range(2)])
        trainer.close()

    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_missing_gpu_is_reported_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_forked(["-m", "benchmarks.gpu"])
    assert done.returncode == 2
    assert done.stderr == "benchmarks.gpu: torch sees no GPU on this machine\n"
