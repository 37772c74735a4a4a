"""A layer with paced compute has its gradients at the end of its time, and its bucket is sent during the layers
below."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from benchmarks.overlap_pace import LayerPace
from megatrain.config.model import ModelConfig
from megatrain.model import TokenContext, Transformer

LAYER_S = 10.0


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_paced_layer_writes_its_gradients_at_its_end(
    block: Literal["serial", "parallel"], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    config = ModelConfig(
        vocab_size=32, seq_len=4, hidden_size=8, num_layers=2, num_heads=2, block=block, has_tied_head=False
    )
    module = Transformer(config)
    assert module.embedding is not None
    assert module.loss_head is not None
    for name, part in (("embedding", module.embedding), *module.blocks.items(), ("head", module.loss_head)):
        part.register_forward_hook(lambda *_, name=name: seen.append(f"forward {name}"))
        for parameter in part.parameters():
            torch.nn.init.ones_(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"gradient {name}"))
    # The clocks are frozen: the waited time is the requested time.
    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(f"benchmarks.overlap_pace.time.{clock}", lambda: 0.0)
    monkeypatch.setattr("benchmarks.overlap_pace.pause_until", seen.append)
    LayerPace(LAYER_S).attach(module)

    tokens_SB = torch.zeros(4, 1, dtype=torch.int64)
    module(tokens_SB, TokenContext(sample_B=torch.zeros(1), seq_len=4), tokens_SB).backward()

    size = sum(one.numel() for one in module.blocks["0"].parameters())
    first, last = (
        LAYER_S * sum(one.numel() for one in part.parameters()) / size for part in (module.embedding, module.loss_head)
    )
    forward = ["forward embedding", first, "forward 0", LAYER_S, "forward 1", LAYER_S, "forward head", last]
    backward = [2.0 * last, "gradient head", 2.0 * LAYER_S, "gradient 1", 2.0 * LAYER_S, "gradient 0", 2.0 * first,
                "gradient embedding"]  # fmt: skip
    without_repeats = [one for at, one in enumerate(seen) if at == 0 or one != seen[at - 1] or isinstance(one, float)]
    assert without_repeats == [*forward, *backward]
