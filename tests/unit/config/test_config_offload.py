"""Rules of parallel.offload_layers."""

from __future__ import annotations


def test_chunk_has_no_more_layers_to_offload_than_it_has(problems_of) -> None:
    (problem,) = problems_of("--parallel.pp_size=2", "--parallel.offload_layers=5")

    assert problem == (
        "parallel.offload_layers=5 must be at most the layers of a chunk, of which none has more than 4 "
        "(model.num_layers=8 over parallel.pp_size * parallel.num_chunks = 2 * 1); use 4 or less "
        "(--parallel.offload_layers on the command line)"
    )
    assert problems_of("--parallel.pp_size=2", "--parallel.offload_layers=4") == ()
    assert (
        problems_of("--parallel.pp_size=2", "--parallel.layers_per_chunk=[3, 5]", "--parallel.offload_layers=5") == ()
    )
