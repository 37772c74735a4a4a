"""A plan of a run as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.planning.run_plan import RunPlan, StagePlan

_GIB = 1 << 30


def render(plan: RunPlan) -> str:
    """Return the plan: the job, its groups, its stages, and the memory of a rank of each kind of stage."""
    sections = [_job(plan), *([_groups(plan)] if plan.groups else []), _stages(plan), _memory(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _job(plan: RunPlan) -> list[str]:
    facts = {
        "layout": f"{plan.layout}: {_count(plan.layout.world_size, 'rank')}",
        "schedule": f"{plan.schedule}, {_count(plan.num_chunks, 'chunk')} a stage, "
        f"{_count(plan.num_microbatches, 'microbatch', 'es')} of {plan.micro_batch_size} a pipeline, "
        f"bubble {plan.bubble_fraction:.1%} of the compute time",
        "step": f"{plan.num_tokens_per_step:,} tokens, {plan.flops_per_token:.4g} FLOPs a token, "
        f"{plan.flops_per_step:.4g} FLOPs a step",
        "model": f"{plan.num_parameters:,} parameters",
    }
    return [f"Dry run of {plan.job}", *(f"  {name:<9} {fact}" for name, fact in facts.items())]


def _groups(plan: RunPlan) -> list[str]:
    rows = [
        [group.name, f"{group.size:,}", f"{group.num_groups:,}", _some(group.example_ranks)] for group in plan.groups
    ]
    return ["Groups", *_table(["kind", "size", "groups", "one of them"], rows, num_left=1, is_last_left=True)]


def _stages(plan: RunPlan) -> list[str]:
    rows = [
        [
            stage.name,
            _stage_numbers(stage),
            f"{len(stage.layers)} x {len(stage.layers[0])}",
            f"{stage.num_parameters:,}",
            f"{stage.memory.num_in_flight}",
            " ".join(_span(chunk) for chunk in stage.layers),
        ]
        for stage in plan.stages
    ]
    heads = ["stage with", "numbers", "chunks x layers", "parameters", "in flight", "layers of the first"]
    return ["Stages (parameters of one rank; in flight: microbatches of a chunk at most)"] + _table(
        heads, rows, num_left=2, is_last_left=True
    )


def _memory(plan: RunPlan) -> list[str]:
    kinds = list(plan.stages[0].memory.by_kind())
    rows = [
        [
            stage.name,
            *(_gib(stage.memory.by_kind()[kind]) for kind in kinds),
            _gib(stage.memory.total),
            stage.memory.moment,
        ]
        for stage in plan.stages
    ]
    return ["Memory of one rank, GiB at the fullest moment of a step (tensors; without what an allocator adds)"] + _table(
        ["stage with", *kinds, "total", "moment"], rows, num_left=1, is_last_left=True
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int, is_last_left: bool) -> list[str]:
    """Return lines of aligned columns: words to the left, numbers to the right."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    last = len(heads) - 1

    def aligned(text: str, column: int) -> str:
        is_left = column < num_left or (is_last_left and column == last)
        return text.ljust(widths[column]) if is_left else text.rjust(widths[column])

    return ["  " + "  ".join(aligned(text, column) for column, text in enumerate(line)).rstrip() for line in lines]


def _stage_numbers(stage: StagePlan) -> str:
    return _span(stage.stages)


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _some(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ..., {ranks[-1]}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
