"""Which pipelines can be built: the one rule that the configuration check and the builder share."""

from __future__ import annotations

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def infeasibility(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> str | None:
    """Return why this pipeline cannot be built, with the rule and the way out, or None when it can."""
    if name not in SCHEDULE_NAMES:
        return f"parallel.schedule={name!r} is not one of {', '.join(SCHEDULE_NAMES)}"
    sizes = {"parallel.pp_size": pp_size, "parallel.num_chunks": num_chunks, "num_microbatches": num_microbatches}
    for key, value in sizes.items():
        if value < 1:
            return f"{key}={value} must be at least 1"
    if num_chunks > 1 and name != "interleaved":
        return (
            f"parallel.num_chunks={num_chunks} needs parallel.schedule='interleaved', found {name!r}; "
            "use schedule='interleaved' or num_chunks=1"
        )
    if name == "interleaved" and num_microbatches < pp_size:
        return (
            f"num_microbatches={num_microbatches} (batch.global_batch_size / (batch.micro_batch_size * dp_size)) must "
            f"be at least parallel.pp_size={pp_size} for parallel.schedule='interleaved', or every change of chunk "
            f"stalls the pipeline; raise batch.global_batch_size to {pp_size} microbatches or use schedule='1f1b'"
        )
    if name == "zero_bubble" and pp_size == 1:
        return (
            "parallel.schedule='zero_bubble' fills the bubble of a pipeline, and parallel.pp_size=1 has none; "
            "use schedule='1f1b' or pp_size=2"
        )
    if name == "zero_bubble" and num_microbatches < pp_size:
        return (
            f"num_microbatches={num_microbatches} (batch.global_batch_size / (batch.micro_batch_size * dp_size)) must "
            f"be at least parallel.pp_size={pp_size} for parallel.schedule='zero_bubble', or there is too little to "
            f"fill the bubble with; raise batch.global_batch_size to {pp_size} microbatches or use "
            "schedule='1f1b'"
        )
    return None
