"""Rules of the settings outside the model: evaluation, logging, checkpoints, profiling, diagnostics, dashboard,
notifications and ports."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.checks.dashboard import dashboard_problems
from megatrain.config.checks.notify import notify_problems
from megatrain.config.config import Config
from megatrain.config.options import options_of
from megatrain.config.problem import Problem, multiples_around
from megatrain.config.recording import LogConfig
from megatrain.config.toml_text import setting, value_text
from megatrain.contracts.network_address import is_loopback
from megatrain.formatting import alternatives


def run_problems(context: Context) -> Iterator[Problem]:
    """Yield the problems of settings outside the model and its training."""
    config = context.config
    yield from _evaluation_problems(config)
    yield from _wandb_problems(config)
    yield from _retention_problems(config)
    yield from _copy_problems(context)
    yield from _profile_problems(context)
    yield from _diagnostics_problems(config)
    yield from dashboard_problems(config.dashboard)
    yield from notify_problems(config)
    yield from _port_problems(config)


def _evaluation_problems(config: Config) -> Iterator[Problem]:
    if config.validation_sets:
        return
    paths = [f"{section}.path" for section in config.sections_of("validation_set")]
    for name in ("interval", "num_samples"):
        value = getattr(config.evaluation, name)
        if value:
            yield Problem(
                (f"evaluation.{name}", "data.validation", *paths),
                f"evaluation.{name}={value} needs data.validation or a [[validation_set]], found neither; "
                f"set data.validation to the path of held-out tokens, or use evaluation.{name}=0",
            )


def _wandb_problems(config: Config) -> Iterator[Problem]:
    keys = ("log.wandb_project", "log.has_wandb")
    project, default = config.log.wandb_project, options_of(LogConfig)["wandb_project"].default
    if config.log.has_wandb and not project:
        yield Problem(
            keys,
            f'log.wandb_project="" must be a name when log.has_wandb=true; use {value_text(default)} '
            f"or has_wandb=false",
        )
    if not config.log.has_wandb and project != default:
        yield Problem(
            keys,
            f"{setting(keys[0], project)} does nothing with log.has_wandb=false; "
            f"use has_wandb=true or wandb_project={value_text(default)}",
        )


def _retention_problems(config: Config) -> Iterator[Problem]:
    interval, every = config.checkpoint.interval, config.checkpoint.keep_every
    if every and not interval:
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.interval"),
            f"checkpoint.keep_every={every} needs checkpoint.interval, found 0: checkpoints that are taken by time "
            f"fall on any step; use interval={every} or keep_every=0",
        )
        return
    if every and not config.checkpoint.num_kept:
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.keep_last"),
            f"checkpoint.keep_every={every} does nothing with checkpoint.keep_last={config.checkpoint.keep_last}, "
            f"which keeps all; use keep_last=2 or keep_every=0",
        )
    if every and every % interval:
        fitting = alternatives(multiples_around(interval, every))
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.interval"),
            f"checkpoint.keep_every={every} must be a multiple of checkpoint.interval={interval}, or some of its "
            f"multiples have no checkpoint; use {fitting}",
        )


def _copy_problems(context: Context) -> Iterator[Problem]:
    if not context.config.checkpoint.has_peer_copies:
        return
    sizes = {"pp_size": context.config.parallel.pp_size, "dp_size": context.dp_size}
    for name, size in sizes.items():
        if size == 1:
            yield Problem(
                ("checkpoint.has_peer_copies", f"parallel.{name}"),
                f"checkpoint.has_peer_copies=true needs parallel.{name} above 1, found 1: a copy is kept by a rank "
                f"with another pp_rank and another dp_rank; use {name}=2 or more, or has_peer_copies=false",
            )


def _diagnostics_problems(config: Config) -> Iterator[Problem]:
    found = config.diagnostics
    if not found.metrics_token_file and not is_loopback(found.metrics_address):
        yield Problem(
            ("diagnostics.metrics_address", "diagnostics.metrics_token_file"),
            f"diagnostics.metrics_address={value_text(found.metrics_address)} can be reached from other machines and "
            f'needs diagnostics.metrics_token_file, found ""; name a file with a token, or use '
            f'metrics_address="127.0.0.1"',
        )
    if found.metrics_port and found.metrics_port == found.daemon_port:
        yield Problem(
            ("diagnostics.metrics_port", "diagnostics.daemon_port"),
            f"diagnostics.metrics_port and diagnostics.daemon_port are both {found.metrics_port}, and one host needs "
            f"both; use another metrics_port, or 0 for any free port",
        )


def _port_problems(config: Config) -> Iterator[Problem]:
    port = config.dashboard.port
    for name in ("metrics_port", "daemon_port", "daemon_metrics_port"):
        if port and port == getattr(config.diagnostics, name):
            yield Problem(
                ("dashboard.port", f"diagnostics.{name}"),
                f"dashboard.port and diagnostics.{name} are both {port}, and one host needs both; use another "
                f"dashboard.port, or 0 for any free port",
            )


def training_problems(config: Config) -> list[Problem]:
    """Return the problems that matter only for training."""
    if config.model.has_pictures and not any(one.has_pictures for one in config.data_sources.values()):
        return [
            Problem(
                ("model.picture_size", "data.pictures"),
                f"model.picture_size={config.model.picture_size} needs training samples with pictures, and "
                'data.pictures="none"; use data.pictures="shards" or "drawn", a [[data_source]] with pictures, or '
                "picture_size=0",
            )
        ]
    if config.data_sources:
        return []
    return [
        Problem(
            ("data.train",),
            'data.train="" must name the training tokens; set it to the path of a .bin and .idx pair without the '
            "suffix (`megatrain data build` makes one), or name several with [[data_source]]",
        )
    ]


def _profile_problems(context: Context) -> Iterator[Problem]:
    profile, steps = context.config.profile, context.config.train.steps
    ranks = value_text(profile.ranks)
    if bool(profile.ranks) != bool(profile.num_steps):
        yield Problem(
            ("profile.ranks", "profile.num_steps"),
            f"profile.ranks={ranks} and profile.num_steps={profile.num_steps} must be set together; "
            f"use ranks=[0] with num_steps=3, or [] with 0 for no profile",
        )
    end = profile.first_step + profile.num_steps
    if profile.num_steps and end > steps:
        yield Problem(
            ("profile.first_step", "profile.num_steps", "train.steps"),
            f"profile.first_step + profile.num_steps = {profile.first_step} + {profile.num_steps} = {end} must be at "
            f"most train.steps={steps}; "
            + (
                f"use first_step={steps - profile.num_steps} or less"
                if profile.num_steps <= steps
                else f"use first_step=0 with num_steps={steps} or less"
            ),
        )
    if len(set(profile.ranks)) < len(profile.ranks):
        unique = value_text(sorted(set(profile.ranks)))
        yield Problem(("profile.ranks",), f"profile.ranks={ranks} must not repeat a rank; use {unique}")
    beyond = [rank for rank in profile.ranks if context.world_size is not None and rank >= context.world_size]
    if beyond:
        yield Problem(
            ("profile.ranks",),
            f"profile.ranks={ranks} must be ranks of this run, found {beyond[0]} with a world size of "
            f"{context.world_size}; use ranks below {context.world_size}",
        )
