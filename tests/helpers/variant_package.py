"""A package with variants of the model, as a user would write it: each kind once, three of them with parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.config.variants import load_variant

SOURCE = """
import torch
from torch import nn
from megatrain.config.variant_parameters import VariantParameter
from megatrain.model.frequencies import Frequencies
from megatrain.ops.recomputed import recomputed

class ReGlu(nn.Module):
    is_gated = True
    def forward(self, x, bias):
        gate, up = (x if bias is None else x + bias).unbind(-2)
        return gate.relu() * up

def leaky_glu(x, bias, slope, offset):
    gate, up = (x if bias is None else x + bias).unbind(-2)
    return torch.where(gate > 0, gate, gate * slope) * (up + offset)

class LeakyGlu(nn.Module):
    is_gated = True
    own_parameters = {"slope": VariantParameter("F", 0.25), "offset": VariantParameter(initial=0.5)}
    def forward(self, x, bias):
        return recomputed(leaky_glu, x, bias, self.slope, self.offset)

class DynamicTanh(nn.Module):  # arXiv:2503.10622
    own_parameters = {"weight": VariantParameter("H", 1.0), "alpha": VariantParameter("", 0.5)}
    def __init__(self, eps):
        super().__init__()
    def forward(self, stream):
        x = stream.total()
        return (self.alpha * x).tanh() * self.weight, x

def capped(q, k, v, pattern, cap=1.5):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 / cap)
    return ((scores + pattern.mask(q.device, q.dtype)).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

class SinkAttention(nn.Module):  # a learned score for each head that takes part in the softmax and has no value
    own_parameters = {"sink": VariantParameter("GR", 0.1), "temper": VariantParameter("", 1.0)}
    def forward(self, q, k, v, pattern):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = self.temper * (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5 + pattern.mask(q.device, q.dtype)
        sink = self.sink.flatten()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return (weights @ v).permute(2, 0, 1, 3).flatten(2)

def none_at_all(model, seq_len):
    return Frequencies(torch.zeros(model.rotated_dim // 2, dtype=torch.float64))

class Counted(nn.Module):
    own_parameters = {"pace": VariantParameter("H", 0.05), "table": VariantParameter("SH", 0.1)}
    def __init__(self, model):
        super().__init__()
    def add(self, x, context):
        first, last = context.token_offset, context.token_offset + len(x)
        number = torch.arange(first, last, dtype=x.dtype, device=x.device)[:, None, None] / context.seq_len
        return x + number * self.pace + self.table[first:last, None]

class Leaning(nn.Module):
    own_parameters = {"stretch": VariantParameter("GR", 0.5), "lean": VariantParameter("D", 0.2)}
    def __init__(self, model):
        super().__init__()
    def rotate(self, q, k, context):
        first, last = context.token_offset, context.token_offset + len(q)
        number = torch.arange(first, last, dtype=q.dtype, device=q.device)[:, None, None, None] / context.seq_len
        return q * (1 + number * self.stretch.flatten()[:, None]), k + number * self.lean

class Both(nn.Module):
    def __init__(self, model):
        super().__init__()
    def add(self, x, context):
        return x + 1.0
    def rotate(self, q, k, context):
        return q, 2 * k

class BothWithParameters(Both):
    own_parameters = {"pace": VariantParameter()}

class NoMapping(nn.Module):
    is_gated = False
    own_parameters = ["slope"]

class WrongDims(nn.Module):
    is_gated = False
    own_parameters = {"slope": VariantParameter("G"), "a b": VariantParameter(), "scale": 1.0}
"""
ENTRY_POINTS = {
    "megatrain.activations": (
        "reglu = others:ReGlu\nleaky_glu = others:LeakyGlu\nbroken = missing_module:X\n"
        "no_mapping = others:NoMapping\nwrong_dims = others:WrongDims"
    ),
    "megatrain.norms": "dynamic_tanh = others:DynamicTanh",
    "megatrain.attentions": "capped = others:capped\nsink = others:SinkAttention",
    "megatrain.positions": (
        "counted = others:Counted\nleaning = others:Leaning\nboth = others:Both\n"
        "both_with_parameters = others:BothWithParameters\nneither = others:ReGlu"
    ),
    "megatrain.rope_scalings": "still = others:none_at_all",
    "megatrain.hf_families": "lost = missing_family:Lost",
}


def write_variant_package(directory: Path, name: str = "one") -> None:
    """Write the package `name` as pip would install it. A second name has the same variants, from another module."""
    (directory / "others.py").write_text(SOURCE)
    information = directory / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "\n".join(f"[{group}]\n{lines}" for group, lines in ENTRY_POINTS.items())
    module = "others" if name == "one" else "elsewhere"
    (information / "entry_points.txt").write_text(points.replace("others:ReGlu", f"{module}:ReGlu"))


@contextmanager
def on_the_path(directory: Path) -> Iterator[None]:
    """Let this process find the package in `directory`."""
    load_variant.cache_clear()
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop("others", None)
        load_variant.cache_clear()
