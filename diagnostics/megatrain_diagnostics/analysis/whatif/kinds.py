"""The operations of what-if analysis, by their names in the public traces, and how each is treated.

Sources: "Understanding Stragglers in Large Model Training" (OSDI'25) sec. 3.2, and the README of its public traces.
"""

from __future__ import annotations

FORWARD, BACKWARD = "forward-compute", "backward-compute"
BACKWARD_WEIGHT = "backward-weight-compute"
"""The wgrad of a backward that a schedule splits; nothing is sent after it. Ours: public traces do not split."""
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
PARAMS_GATHER, GRADS_SCATTER = "params-all-gather", "grads-reduce-scatter"
NORM_REDUCE, EMBEDDING_REDUCE = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SEPARATE_REDUCE = "separate-grads-all-reduce"
"""Gradients outside the buckets. Where a trace has it, the other gradients are reduced while backwards still run."""
CLIP, OPTIMIZER, GC = "optimizer-clip-main-grad", "optimizer", "gc"

COMPUTES = frozenset({FORWARD, BACKWARD, BACKWARD_WEIGHT})
MESSAGES = frozenset({FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV})
COLLECTIVES = frozenset({PARAMS_GATHER, GRADS_SCATTER, SEPARATE_REDUCE, EMBEDDING_REDUCE, CLIP})
SHARED = frozenset({PARAMS_GATHER, GRADS_SCATTER, SEPARATE_REDUCE, CLIP})
"""Operations that no rank leaves before all data-parallel ranks have entered."""
MEDIAN_KINDS = MESSAGES | COLLECTIVES | {NORM_REDUCE}
"""Their ideal is the median, because communication has a long tail. Others have the mean: work can be redistributed."""
KNOWN_KINDS = COMPUTES | MEDIAN_KINDS | {OPTIMIZER, GC}

MESSAGE_CLASSES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""Both ends of a message are one class when slowdown is reported by operation."""


def class_of(kind: str) -> str:
    """Return the name under which an operation's slowdown is reported."""
    return MESSAGE_CLASSES.get(kind, kind)
