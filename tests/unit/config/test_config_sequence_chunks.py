"""Rules of parallel.num_sequence_chunks."""

from __future__ import annotations

PLACE = " (--parallel.num_sequence_chunks on the command line)"


def test_chunks_are_equal_parts_of_a_ranks_rows(problems_of) -> None:
    fitting = ["--parallel.tp_size=4", "--parallel.num_sequence_chunks=8"]
    assert problems_of(*fitting) == ()
    assert problems_of(*fitting, "--parallel.overlap=false") == ()

    (problem,) = problems_of("--parallel.tp_size=4", "--parallel.num_sequence_chunks=6")
    assert problem == (
        "parallel.num_sequence_chunks=6 must divide model.seq_len / parallel.tp_size = 64 / 4 = 16; "
        "use 1, 2, 4, 8 or 16" + PLACE
    )


def test_chunks_need_a_rank_to_exchange_with(problems_of) -> None:
    (problem,) = problems_of("--parallel.num_sequence_chunks=4")

    assert problem == (
        "parallel.num_sequence_chunks=4 does nothing with parallel.tp_size=1; use tp_size=2 or more, or "
        "num_sequence_chunks=1" + PLACE
    )


def test_chunks_need_a_layer_that_does_not_multiply_in_fp8(problems_of) -> None:
    wanted = ["--model.num_heads=10", "--model.hidden_size=320", "--parallel.tp_size=2", "--fp8.recipe=tensorwise"]
    chunks = "--parallel.num_sequence_chunks=2"

    (problem,) = problems_of(*wanted, chunks)
    assert problem == (
        "parallel.num_sequence_chunks=2 does nothing if all layers multiply in FP8, which needs all rows at once; use "
        'num_sequence_chunks=1 or fp8.recipe="none"' + PLACE
    )
    assert problems_of(*wanted, chunks, "--fp8.skip_layers=[0]") == ()


def test_wrong_sizes_are_reported_once(problems_of) -> None:
    (problem,) = problems_of("--parallel.tp_size=3", "--parallel.num_sequence_chunks=2", "--model.num_heads=15",
                             "--model.hidden_size=480", "--model.vocab_multiple=3")  # fmt: skip

    assert problem.startswith("parallel.tp_size=3 must divide model.seq_len=64")
