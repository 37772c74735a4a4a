"""The kinds of operations of what-if analysis, by their names in the public traces, and sets of kinds.

Sources: "Understanding Stragglers in Large Model Training" (OSDI'25) sec. 3.2, and the README of its public traces.
"""

from __future__ import annotations

FORWARD, BACKWARD = "forward-compute", "backward-compute"
BACKWARD_WEIGHT = "backward-weight-compute"
"""The wgrad part of a split backward; no message depends on it. Not in public traces, which have no split backwards."""
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
PARAMS_GATHER, GRADS_SCATTER = "params-all-gather", "grads-reduce-scatter"
NORM_REDUCE, EMBEDDING_REDUCE = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SEPARATE_REDUCE = "separate-grads-all-reduce"
"""Gradients outside the buckets. In a trace with this kind, other gradients are reduced during the backwards."""
CLIP, OPTIMIZER, GC = "optimizer-clip-main-grad", "optimizer", "gc"

COMPUTES = frozenset({FORWARD, BACKWARD, BACKWARD_WEIGHT})
MESSAGES = frozenset({FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV})
COLLECTIVES = frozenset({PARAMS_GATHER, GRADS_SCATTER, SEPARATE_REDUCE, EMBEDDING_REDUCE, CLIP})
SHARED = frozenset({PARAMS_GATHER, GRADS_SCATTER, SEPARATE_REDUCE, CLIP})
"""Operations that end only after all data-parallel ranks have entered them."""
MEDIAN_KINDS = MESSAGES | COLLECTIVES | {NORM_REDUCE}
"""Their ideal duration is the median, because communication has a long tail. For other kinds it is the mean, because
work can be redistributed."""
KNOWN_KINDS = COMPUTES | MEDIAN_KINDS | {OPTIMIZER, GC}

MESSAGE_CLASSES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""Send and receive are one class when slowdown is reported by operation."""


def class_of(kind: str) -> str:
    """Return the name under which an operation's slowdown is reported."""
    return MESSAGE_CLASSES.get(kind, kind)
