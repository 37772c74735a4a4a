"""Messages of megatrain's programs.

The exit codes of these programs are more exact, but sometimes only the log of a worker exists.
"""

from __future__ import annotations

from megatrain_job.failures.rule import LOST_PEER, NOISE, SIGNAL_FROM_OUTSIDE, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import Label

RULES: tuple[Rule, ...] = (
    rule(
        # for too many skipped steps in a row the trainer has another message, below
        "skipped-step", Label.BENIGN, NOISE,
        "| skipped & loss nan & data wait", "| skipped & loss inf & data wait", "| skipped & norm nan & data wait",
        "| skipped & norm inf & data wait",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        # training continues after this line, which names a disk's error
        "sample-replaced", Label.BENIGN, NOISE, "data.bad_samples: sample & is replaced by one without labels",
        is_silencer=True, names_own_rank=False,
    ),
    rule(
        # training continues after this line; a later end of the process has another reason
        "checkpoint-tried-again", Label.BENIGN, NOISE, "a checkpoint failed and is tried again at the next",
        is_silencer=True, names_own_rank=False,
    ),
    rule("too-many-skipped-steps", Label.NUMERICS, SPECIFIC, "train.max_skipped_steps & in a row"),
    # every rank prints this message, which names the ranks that differ
    rule(
        "replicas-differ", Label.NUMERICS, SPECIFIC, "parameters differ & train.checksum_interval",
        names_own_rank=False,
    ),
    rule(
        "exchange-failed", Label.NETWORK, LOST_PEER, "an exchange of this phase may take",
        is_cascade=True, is_fallback=True, names_own_rank=False,
    ),
    rule(
        "killed-without-save", Label.PREEMPTION, SIGNAL_FROM_OUTSIDE + 3,
        "did not finish its step & runtime.save_grace_s", names_own_rank=False,
    ),
    rule(
        "saving-failed", Label.STORAGE, SPECIFIC,
        "megatrain: error: & its snapshot is not in storage after",
        "megatrain: error: the checkpoint of step & did not reach",
        unless=r"another rank waits for storage",
    ),
    rule(
        # its reason, such as a connection that was reset, would otherwise count as a lost peer
        "data-unreachable", Label.NETWORK, SPECIFIC, "megatrain: error: & cannot be read, after & tries: & the storage",
        is_silencer=True,
    ),
    rule(
        "waits-for-rank-at-storage", Label.STORAGE, SPECIFIC, "another rank waits for storage",
        is_cascade=True, names_own_rank=False,
    ),
)  # fmt: skip
