"""Compares the time that the eviction of slow hosts saves over the rest of the job with the cost of a restart.

Pure functions: no I/O and no clock. The cost (`cost_s`) is measured from this job's restarts: seconds without a step
plus the time of repeated steps. Hosts are evicted if the gain per step x the remaining steps exceeds the cost: ADR 0023
(MegaScale sec. 5 evicts by hand).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.rounds import Round
from megatrain.formatting import count_text
from megatrain_job.jobs.lost_time import measured_restart_cost_s
from megatrain_launcher.driver.incidents import last_step, median_step_s
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState


@dataclass(frozen=True, slots=True)
class Balance:
    """The time that an eviction saves over the rest of the job, and the time that it costs. `text` explains both."""

    gain_s: float
    cost_s: float
    text: str

    @property
    def is_worth_it(self) -> bool:
        return self.gain_s > self.cost_s


def balance_of(
    state: ClusterState, policy: Policy, round_: Round, verdict: HostVerdict, num_hosts: int, num_spares: int
) -> Balance:
    """Return the gain and the cost of continuing without `num_hosts` hosts of a round.

    With too few spares, the gain is computed for the largest possible layout: a step's time is proportional to
    its slots (Policy.slots). If this layout has more slots than before, the cost includes the wait for hosts.
    """
    num_before = len(round_.hosts)
    num_after = policy.best_count(min(num_before, num_before - num_hosts + num_spares))
    done = last_step(state, round_)
    done = done if done is not None else (verdict.last_step or 0)
    num_steps = max(0, policy.train_steps - done)
    measured = measured_restart_cost_s(state.incidents[key] for key in sorted(state.incidents))
    cost_s = policy.restart_cost_s if measured is None else measured
    origin = "measured" if measured is not None else f"diagnostics.restart_cost_s={policy.restart_cost_s:g}"
    gain_s = verdict.gain_s_per_step
    text = ""
    if num_after < num_before:
        before, after = policy.slots(num_before), policy.slots(num_after)
        if after > before:
            cost_s += policy.shrink_after_s
            origin = f"{origin}, and {policy.shrink_after_s:g} s until the job shrinks"
            step_s = verdict.step_s or median_step_s(state, round_)
            gain_s = 0.0 if step_s is None else step_s - (step_s - gain_s) * after / before
        spares = count_text(num_spares, "spare")
        text = (
            f"on {num_after} of {count_text(num_before, 'host')}, {after:g} slots a step after {before:g} "
            f"({spares} can take part): "
        )
    gain_s = max(0.0, gain_s)
    text = (
        f"{text}{gain_s:.4g} s a step over {count_text(num_steps, 'step')} saves {gain_s * num_steps:.4g} s; "
        f"a restart costs {cost_s:.4g} s ({origin})"
    )
    return Balance(gain_s * num_steps, cost_s, text)
