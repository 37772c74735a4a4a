"""What a run says about its batches before its first step."""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.training.batch_notes import batch_notes

SEQ_LEN = 16
IDLE_8 = "11.1% of the slots are idle: 8 micro-batches for 3 replicas, 2 to 3 each"
IDLE_4 = "33.3% of the slots are idle: 4 micro-batches for 3 replicas, 1 to 2 each"
TO_4, TO_12 = f"from step 3 on, the global batch is 4; {IDLE_4}", "from step 4 on, the global batch is 12"
# (train.steps, completed steps, cursor, left out) and the notes; steps of 8, 8, 4, 12, 12 samples
NOTES: list[tuple[tuple[int, int, int, SampleRanges], list[str]]] = [
    ((6, 0, 0, ()), [IDLE_8, TO_4, TO_12]),
    ((3, 0, 0, ()), [IDLE_8, TO_4]),
    ((2, 0, 0, ()), [IDLE_8]),
    ((6, 2, 16, ()), [IDLE_4, TO_12]),
    ((6, 3, 20, ()), []),
    # the first stage lies within samples that the run leaves out
    ((6, 1, 8, ((8, 24),)), []),
]


def test_notes_name_idle_slots_and_the_stages_ahead() -> None:
    for (steps, step, cursor, skipped), expected in NOTES:
        config = Config.from_dict(
            {
                "model": {"vocab_size": 90, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 1, "num_heads": 4},
                "batch": {"global_batch_size": 8},
                "train": {"steps": steps},
                "optimizer": {"lr": 1e-3},
                "data_stage": {"after_tokens": 10 * SEQ_LEN - 3, "global_batch_size": 4},
                "data_stage-2": {"after_tokens": 20 * SEQ_LEN, "global_batch_size": 12},
            }
        )
        found = list(batch_notes(config, Layout(dp_size=3), step, cursor, skipped))
        assert found == expected, (steps, step, cursor)
