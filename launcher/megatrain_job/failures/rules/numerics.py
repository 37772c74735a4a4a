"""Numerical failures: NaN and infinity in loss and gradients, loss scales at their minimum, loss spikes."""

from __future__ import annotations

from megatrain_job.failures.rule import EXCEPTION, SPECIFIC, Rule, rule
from megatrain_job.failures.verdict import Label

_NOT_FINITE = r"(?:nan|[-+]?inf(?:inity)?)\b"
_GUARDS_OFF = (
    r"check_for_nan|nan_check|detect_anomaly\(|--|ignor|(?:skipped|skipping) (?:sample|batch)|\bnan_|no clipping|"
    r"max[ _]grad"
)

_METRICS = tuple(
    metric + between + value
    for metric in ("loss", "norm", "ppl", "perplexity")
    for between in (" ", ": ", ":", "=", " = ", " : ", " is ", " was ", "': ", '": ', "': '", ": '", " became ")
    for value in ("nan", "inf", "-inf", "infinity")
)
"""Metrics as log lines, dictionaries and progress bars write them. Without these words, the pattern would be searched
in every line of metrics."""

RULES: tuple[Rule, ...] = (
    rule(
        "metric-not-finite", Label.NUMERICS, EXCEPTION + 1,
        *_METRICS,
        pattern=r"(?:loss|norm|ppl|perplexity)\b.{0,12}?[-+ :='\"]" + _NOT_FINITE,
        unless=_GUARDS_OFF,
    ),
    rule(
        "non-finite-guard", Label.NUMERICS, SPECIFIC,
        "found nan", "found inf", "nan in local grad", "nan in & grad", "nan & detected", "inf & detected",
        "nan loss", "loss is nan", "loss is inf", "loss is not finite", "non-finite", "nonfinite", "not finite",
        "returned nan values", "nan or inf found", "nan/inf", "inf/nan", "nan or inf", "inf or nan", "nans",
        "minimum loss scale reached", "loss scale already at minimum", "loss diverged", "training diverged",
        "divergence & detected", "loss divergence", "model divergence", "loss spike", "loss & spike",
        "nan encountered", "encountered nan",
        "contains either `inf`, `nan`", "nan grad", "grad & overflow & too many", "floatingpointerror",
        "unexpected result nan", "unexpected result inf", "rejecting & result nan", "is nan & step",
        "probability tensor contains", "spiky loss", "grad norm is nan", "gradient norm & nan", "grad_norm & nan",
        "unexpected nan", "nan values", "invalid loss", "loss explosion", "loss exploded", "gradient explosion",
        "skipped steps in a row", "lossspike", "loss scale is 0 & step", "loss scale & underflow", "loss scale to 0",
        "rerun_state_machine & unexpected result",
        pattern=r"\bnan|\binf\b|finite|diverge|spik|scale|minimum|explo|in a row|floatingpointerror|infinity|"
                r"invalid loss|nan\b|unexpected result",
        unless=_GUARDS_OFF + r"|loss scale to 0\.\d*[1-9]|no (?:nan|inf)|scale reached.*skipping|monitor|enabled|"
                             r"watch|will|detector|kl[_ -]?div",
    ),
)  # fmt: skip
