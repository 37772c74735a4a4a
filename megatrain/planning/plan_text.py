"""A plan of a run as text for a terminal: the output of `megatrain config check CONFIG --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.config import Config
from megatrain.contracts.layout import axis_named
from megatrain.formatting import bytes_text, count_text, ranges_text
from megatrain.planning.run_plan import RunPlan, StagePlan, plan_run

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def render(plan: RunPlan) -> str:
    """Return the plan as text: the job, its axes and groups, its stages, the memory of a rank per kind of stage, and
    parameter groups, later batches and traffic, if there are any."""
    sections = [_job(plan), _axes(plan), *([_groups(plan)] if plan.groups else []), _stages(plan)]
    sections += [_parameters(plan)] if len(plan.grouped_parameters) > 1 else []
    sections += [_memory(plan)]
    sections += [_batches(plan)] if plan.later else []
    sections += [_traffic(plan)] if any(stage.traffic for stage in plan.stages) else []
    return "\n\n".join("\n".join(lines) for lines in sections)


def _job(plan: RunPlan) -> list[str]:
    facts = {
        "layout": f"{plan.layout}: {count_text(plan.layout.world_size, 'rank')}",
        "schedule": f"{plan.schedule}, {count_text(plan.num_chunks, 'chunk')} a stage, "
        f"{count_text(plan.num_microbatches, 'micro-batch', 'micro-batches')} of {plan.micro_batch_size} a pipeline, "
        f"bubble {plan.bubble_fraction:.1%} of the compute time",
        **({"idle": plan.idle} if plan.idle else {}),
        "buckets": f"{plan.bucket_size:,} elements or more, exchanged "
        + (f"together for each chunk ({plan.by_chunk})" if plan.by_chunk else "one by one while their chunk computes"),
        "step": f"{plan.num_tokens_per_step:,} tokens, {plan.flops_per_token:.4g} FLOPs a token, "
        f"{plan.flops_per_step:.4g} FLOPs a step",
        "model": f"{plan.num_parameters:,} parameters, "
        f"{bytes_text(plan.checkpoint_bytes)} of weights and optimizer state a checkpoint",
    }
    return [f"Dry run of {plan.job}", *(f"  {name:<9} {fact}" for name, fact in facts.items())]


def _axes(plan: RunPlan) -> list[str]:
    rows = [
        [axis.name, axis.title, f"{plan.layout.size(axis.name):,}", f"{plan.layout.stride(axis.name):,}", axis.about]
        for axis in map(axis_named, plan.layout.axes)
    ]
    heads = ["axis", "parallelism", "size", "stride", "its ranks"]
    return ["Axes (stride: distance between neighboring ranks)", *_table(heads, rows, num_left=2)]


def _groups(plan: RunPlan) -> list[str]:
    rows = [
        [group.name, f"{group.size:,}", f"{group.num_groups:,}", _some(group.example_ranks)] for group in plan.groups
    ]
    return ["Groups", *_table(["kind", "size", "groups", "example"], rows, num_left=1)]


def _stages(plan: RunPlan) -> list[str]:
    rows = [
        [
            stage.name,
            ranges_text(stage.stages),
            _layer_counts(stage),
            f"{stage.num_parameters:,}",
            f"{stage.memory.num_in_flight}",
            "; ".join(ranges_text(chunk) or "-" for chunk in stage.layers),
        ]
        for stage in plan.stages
    ]
    heads = ["stage with", "numbers", "chunks x layers", "parameters", "in flight", "layers of the first"]
    return [
        "Stages (parameters of one rank; in flight: micro-batches of a chunk at most)",
        *_table(heads, rows, num_left=2),
    ]


def _parameters(plan: RunPlan) -> list[str]:
    rows = [
        [
            parameter.pattern or "(in no group)",
            parameter.rule.name,
            f"{parameter.num_tensors:,}",
            f"{parameter.num_parameters:,}",
            f"{parameter.rule.lr_scale:g}",
            f"{parameter.rule.weight_decay:g}" + (" of all" if parameter.rule.decays_all else " of matrices"),
        ]
        for parameter in plan.grouped_parameters
    ]
    heads = ["pattern", "update", "tensors", "parameters", "lr scale", "weight decay"]
    return [
        "Parameter groups of the whole model (the first matching pattern applies)",
        *_table(heads, rows, num_left=2),
    ]


def _memory(plan: RunPlan) -> list[str]:
    largest = max(stage.memory.total for stage in plan.stages)
    unit, unit_bytes = next((unit_row for unit_row in _UNITS if largest >= unit_row[1]), _UNITS[-1])
    kinds = list(plan.stages[0].memory.by_kind())
    rows = [
        [
            stage.name,
            *(f"{num_bytes / unit_bytes:.2f}" for num_bytes in stage.memory.by_kind().values()),
            f"{stage.memory.total / unit_bytes:.2f}",
            stage.memory.moment,
        ]
        for stage in plan.stages
    ]
    return [
        f"Memory of one rank in {unit}, at the peak of a step (tensors only; an allocator needs more)",
        "  an upper bound: gradients in exchanges count until they are awaited, messages for one more computation",
        *_table(["stage with", *kinds, "total", "moment"], rows, num_left=1),
        *_host_memory(plan),
    ]


def _batches(plan: RunPlan) -> list[str]:
    """Return a row for each stage of the data: its start, its batch, and the memory of the rank that needs most."""
    starts: list[tuple[int, int, RunPlan]] = [
        (0, 0, plan),
        *((one.after_tokens, one.first_step, one.plan) for one in plan.later),
    ]
    fullest = max(starts, key=lambda start: start[2].largest_stage.memory.total)
    rows = [
        [
            f"{after_tokens:,}",
            f"{first_step + 1:,}",
            f"{one.global_batch_size:,}",
            f"{one.seq_len:,}",
            f"{one.num_tokens_per_step:,}",
            f"{one.num_microbatches:,}",
            f"{one.bubble_fraction:.1%}",
            f"{one.idle_share:.1%}",
            bytes_text(one.largest_stage.memory.total),
            one.largest_stage.name,
        ]
        for after_tokens, first_step, one in starts
    ]
    heads = ["from token", "from step", "batch", "tokens a sample", "tokens a step", "micro-batches"]
    heads += ["bubble", "idle", "memory", "in stage"]
    return [
        "Batch by stage of the data (memory: of the rank that needs most; other sections are about the first row)",
        *_table(heads, rows, num_left=0),
        f"  most memory: from token {fullest[0]:,} on, {bytes_text(fullest[2].largest_stage.memory.total)}",
    ]


def _traffic(plan: RunPlan) -> list[str]:
    rows = [
        [stage.name, traffic.group, traffic.what, bytes_text(traffic.num_bytes)]
        for stage in plan.stages
        for traffic in stage.traffic
    ]
    return [
        "Traffic: bytes that one rank sends in a step, without small sums",
        *_table(["stage with", "group", "content", "bytes"], rows, num_left=3),
    ]


def _host_memory(plan: RunPlan) -> list[str]:
    most = max(stage.memory.on_host for stage in plan.stages)
    if not most:
        return []
    unit, unit_bytes = next((unit_row for unit_row in _UNITS if most >= unit_row[1]), _UNITS[-1])
    needs = ", ".join(f"{stage.name}: {stage.memory.on_host / unit_bytes:.2f}" for stage in plan.stages)
    return [f"Offloaded activations of one rank, pinned in host memory, in {unit} (a host has several ranks): {needs}"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Return lines of aligned columns: the first `num_left` and the last align left, the others right."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    last = len(heads) - 1

    def aligned(text: str, column: int) -> str:
        is_left = column < num_left or column == last
        return text.ljust(widths[column]) if is_left else text.rjust(widths[column])

    return ["  " + "  ".join(aligned(text, column) for column, text in enumerate(line)).rstrip() for line in lines]


def _layer_counts(stage: StagePlan) -> str:
    counts = [len(chunk) for chunk in stage.layers]
    return f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else " + ".join(map(str, counts))


def _some(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ..., {ranks[-1]}"


def dry_run(config: Config) -> str:
    """Return a text about what every rank would do and hold. With parallel.dp_size=0, one replica is assumed.

    Raises: TopologyError when layout, tensor plan or schedule cannot be built.
    """
    return render(plan_run(config))
