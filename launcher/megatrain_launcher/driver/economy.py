"""Whether it pays to continue without slow hosts: what the rest of the job gains against the price of a restart. Pure.

The price is what restarts of this job have cost: seconds without a step and the steps that were done again. What-if
slowdown x remaining time against that price is the rule of DESIGN decision 14 (MegaScale sec. 5 evicts by hand).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.host_verdict import HostVerdict
from megatrain.contracts.rounds import Round
from megatrain.contracts.texts import count_text
from megatrain.jobs.lost_time import restart_price_s
from megatrain_launcher.driver.incidents import last_step, median_step_s
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState


@dataclass(frozen=True, slots=True)
class Balance:
    """What an eviction brings over the rest of the job, and what it costs. `text` says how both were found."""

    gain_s: float
    price_s: float
    text: str

    @property
    def is_worth_it(self) -> bool:
        return self.gain_s > self.price_s


def balance_of(
    state: ClusterState, policy: Policy, round_: Round, verdict: HostVerdict, num_hosts: int, num_spares: int
) -> Balance:
    """Return what it brings to go on without `num_hosts` hosts of a round.

    Where there are too few spares the job goes on with the largest layout that is left, after it has waited for others.
    """
    num_before = len(round_.hosts)
    num_after = policy.best_count(min(num_before, num_before - num_hosts + num_spares))
    done = last_step(state, round_)
    done = done if done is not None else (verdict.last_step or 0)
    num_steps = max(0, policy.train_steps - done)
    measured = restart_price_s(state.incidents[key] for key in sorted(state.incidents))
    price_s = policy.restart_price_s if measured is None else measured
    price = "measured" if measured is not None else f"diagnostics.restart_price_s={policy.restart_price_s:g}"
    gain_s = verdict.gain_s_per_step
    text = ""
    if num_after < num_before:
        price_s += policy.shrink_after_s
        price = f"{price}, and {policy.shrink_after_s:g} s until the job shrinks"
        step_s = verdict.step_s or median_step_s(state, round_)
        if step_s is None or not num_after:
            gain_s = 0.0
        else:
            gain_s = step_s - (step_s - gain_s) * num_before / num_after
        text = f"with {num_after} of {count_text(num_before, 'host')}, for {count_text(num_spares, 'spare')} is there, "
    gain_s = max(0.0, gain_s)
    text = (
        f"{text}{gain_s:.4g} s a step over {count_text(num_steps, 'step')} gain {gain_s * num_steps:.4g} s, "
        f"a restart costs {price_s:.4g} s ({price})"
    )
    return Balance(gain_s * num_steps, price_s, text)
