"""Pipeline schedules as data: generators, the feasibility rule, closed forms, and a checker that proves a schedule.

A schedule is one list of actions per stage (compute, send, receive, gather, reduce). The pipeline runtime executes it,
the checker proves it, planning reads the activations in flight from it, and `render` draws it as text. A schedule has
no durations: only tests and the benchmark `overlap` compute when its actions start and end. The dashboard's timeline
shows recorded spans. Standard library only.
"""

from __future__ import annotations

from megatrain.schedule.action import COMPUTES, MESSAGES_OF, MICROBATCH_ENDS, Action, ActionKind, Schedule
from megatrain.schedule.build import build_schedule, forward_only
from megatrain.schedule.checker import check_schedule
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.drawing import render
from megatrain.schedule.kinds import (
    CHUNKED_NAMES,
    KINDS,
    SCHEDULE_NAMES,
    ScheduleKind,
    ScheduleName,
    bubble_fraction,
    in_flight_bound,
    infeasibility,
    layout_infeasibilities,
    nearest_schedule,
)
from megatrain.schedule.order import ComputeDurations
from megatrain.schedule.stage_rules import peak_in_flight

__all__ = [
    "CHUNKED_NAMES",
    "COMPUTES",
    "KINDS",
    "MESSAGES_OF",
    "MICROBATCH_ENDS",
    "SCHEDULE_NAMES",
    "Action",
    "ActionKind",
    "ChunkPlacement",
    "ComputeDurations",
    "Schedule",
    "ScheduleKind",
    "ScheduleName",
    "bubble_fraction",
    "build_schedule",
    "check_schedule",
    "forward_only",
    "in_flight_bound",
    "infeasibility",
    "layout_infeasibilities",
    "nearest_schedule",
    "peak_in_flight",
    "render",
]
