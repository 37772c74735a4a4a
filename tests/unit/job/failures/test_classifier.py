"""Properties for every log: chunks, order, surrounding noise, bounded memory; the index finds every matching rule."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_job.failures.classifier import LogClassifier, classify
from megatrain_job.failures.lines import MAX_LINE_BYTES, clean, message_start, rank_of_line
from megatrain_job.failures.rules.table import ALL_RULES
from megatrain_job.failures.shapes import MAX_RUNS, MAX_SHAPES, ShapeIndex, shapes_of

LOG = b"""\
[rank0]: step 1 loss: 2.1
\x1b[31m[rank3]: Traceback (most recent call last):\x1b[0m
[rank3]:   File "/opt/env/torch/utils/data/_utils/fetch.py", line 52, in fetch
\x1b[1;31m[rank3]: Value\x1b[0mError: bad length 7\r
10%|#         | 1/10 [00:01<00:09]\r20%|##        | 2/10 [00:02<00:08]\r
UserWarning: odd
[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91) ran for 1 ms
W0302 api.py:900] Sending process 77 closing signal SIGTERM"""

BENIGN = [
    b"step 12 loss: 2.31 grad norm: 0.4",
    b"UserWarning: something odd",
    b"INFO wrote 12 files",
    b"",
    b"NCCL INFO Using network Socket",
    b"Sending process 12 closing signal SIGTERM",
    "caf\u00e9 \u2603".encode(),
    b"\xff\xfe\x00 not a text",
]


def fed(log: bytes, cuts: list[int]) -> LogClassifier:
    classifier = LogClassifier()
    places = [0, *sorted(cut % (len(log) + 1) for cut in cuts), len(log)]
    for start, end in itertools.pairwise(places):
        classifier.feed(log[start:end])
    classifier.finish()
    return classifier


@pytest.mark.slow
@given(st.lists(st.integers(0, 4096), max_size=12))
@settings(max_examples=150)
def test_chunks_change_nothing(cuts: list[int]) -> None:
    assert fed(LOG, cuts).verdict == classify(LOG)


def test_log_with_noise_is_classified_by_its_first_cause() -> None:
    verdict = classify(LOG)

    assert (verdict.label, verdict.culprit, verdict.line) == ("data", "rank 3", "[rank3]: ValueError: bad length 7")


@pytest.mark.parametrize("size", [1, 7, 4096, MAX_LINE_BYTES])
def test_chunks_change_nothing_in_endless_lines(size: int) -> None:
    log = (
        b"x " * MAX_LINE_BYTES + b"\n" + b"y" * (3 * MAX_LINE_BYTES - 7) + b" KeyError: 'a'\nMemoryError\nKeyError: 'a'"
    )
    whole = classify(log)

    assert (
        fed(log, list(range(0, len(log), size)) if size > 1 else list(range(len(log) - 99, len(log)))).verdict == whole
    )
    assert whole.label == "host_oom"


def test_long_lines_are_cut() -> None:
    line = b"z" * (2 * MAX_LINE_BYTES + 5)

    assert [len(part) for part in clean(line).splitlines()] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5]
    assert clean(b"a\n\n\x1b[31mb\r\n") == b"a\n\nb\r\n"


@given(st.lists(st.sampled_from(BENIGN), max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_benign_lines_around_a_failure_change_nothing(noise: list[bytes], rng: random.Random) -> None:
    failure = b"[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total"
    lines = [*noise, failure]
    rng.shuffle(lines)

    verdict = classify(b"\n".join(lines))

    assert verdict == classify(failure)


PREFIXES = [
    "",
    "[rank3]: ",
    "3: ",
    "[3]<stderr>:",
    "[1,3]<stderr>: ",
    "[default3]:",
    "2026-01-02 03:04:05,678 ERROR ",
    "2026-01-02T03:04:05.678Z stderr F ",
    "(TrainActor pid=77, ip=10.0.0.3) ",
    "worker-3: ",
    "[2026-01-02 03:04:05] [ERROR] ",
    "\x1b[36m(pid=77)\x1b[0m ",
]


def test_prefixes_of_lines_hide_no_failure() -> None:
    assert {before: classify(before + "KeyError: 'lm_head'").label for before in PREFIXES} == dict.fromkeys(
        PREFIXES, "user_code"
    )
    full = "OSError: [Errno 28] No space left on device"
    assert {before: classify(before + full).label for before in PREFIXES} == dict.fromkeys(PREFIXES, "storage")


def test_an_exceptions_name_in_a_sentence_is_no_exception() -> None:
    assert classify("INFO the handler turns a KeyError: into a default").label == "benign"
    assert classify("WARNING ignoring ValueError: odd flag").label == "benign"


def test_notes_of_transformers_are_noise() -> None:
    note = "You are using the default legacy behaviour of the <class 'LlamaTokenizer'>."  # codespell:ignore behaviour
    assert classify(note).rule == "library-start-noise"


def test_rank_of_a_line() -> None:
    ranks = {
        "[rank12]: x": "12",
        "7: x": "7",
        "[1,4]<stdout>x": "4",
        "[Rank 5] x": "5",
        "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD": "3",
        "x": None,
        "srun: error: task 2: rank 6 lost": "6",
        # ranks of memory modules, disks and schedulers
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0 (channel:1 slot:0 rank:3 row:0x1)": None,
        "mcelog: Hardware event. rank 1 of a module": None,
        "kernel: EDAC sbridge MC1: socket:1 ha:0 channel_mask:1 rank:1": None,
        "Memory | Uncorrectable ECC | DIMM_A1 rank 0": None,
        "kernel: mce: [Hardware Error]: Machine check: bank 7 rank 2": None,
        "kernel: csrow3: rank 1 of channel 0 has 12 errors": None,
        "ipmitool: SEL 4f | Memory #0x53 | Correctable ECC, rank 1": None,
        "ipmi_si: correctable errors of rank 0": None,
        "md/raid10:md0: disk failure on sdc1, rank 2": None,
        "MegaRAID: drive 4 of span 0, rank 3 is offline": None,
        "mdadm: device 4 has rank 2 of 8": None,
        "slurmctld: job 4711 has rank 12 in the queue": None,
        "slurmstepd: error: task rank 5 of job step 17.0": None,
        "sched/backfill: job 17 at rank 4 cannot start": None,
        "topology/tree: switch s3 has rank 2": None,
        "[host1:01234] node rank 2 of this job": None,
        "[mpiexec@host1] HYDT_bscu: hydra proxy at rank 1 ended": None,
        "[rank2]: EDAC MC0: rank:3": "2",
        "[rank2]: slurmstepd: rank 3": "2",
    }
    assert {line: rank_of_line(line) for line in ranks} == ranks


def test_a_message_starts_after_its_prefixes() -> None:
    line = "[rank3]: 2026-01-02 03:04:05 ERROR boom"

    assert line[message_start(line) :] == "boom"
    assert message_start("") == 0


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    rng = random.Random(3)
    classifier = LogClassifier()

    def feed_lines(count: int) -> None:
        for _ in range(count):
            words = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(8))
            classifier.feed(f"{words} error: {words}\nKeyError: {words}\n")

    feed_lines(MAX_RUNS // 8 + MAX_SHAPES)
    tracemalloc.start()
    feed_lines(2000)
    classifier.feed(b"z" * 5_000_000)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 24_000_000
    assert current < 8_000_000


@pytest.mark.slow
def test_the_shape_leads_to_every_rule_that_matches() -> None:
    # The oracle: each rule is applied to each line that contains its words, without any index.
    index = ShapeIndex(ALL_RULES)
    rng = random.Random(5)
    lines = []
    for rule in ALL_RULES:
        for words in rule.alternatives:
            digits = "".join(rng.choices("0123456789", k=2))
            lines.append(f"{digits} at {digits}: " + f" {digits} ".join(words) + f" {digits}")
    blocks = shapes_of("\n".join(lines).encode())
    assert len(blocks) == len(lines)
    found = {number: {rule.name for rule, _ in entry.rules} for number, entry in index.interesting(blocks)}

    every_word = {word for rule in ALL_RULES for words in rule.alternatives for word in words}
    holding = {word: {number for number, line in enumerate(lines) if word in line} for word in every_word}
    for rule in ALL_RULES:
        for number in set().union(
            *(set.intersection(*(holding[word] for word in words)) for words in rule.alternatives)
        ):
            line = lines[number]
            if rule.matches(line, line, rule.alternatives):
                assert rule.name in found.get(number, set()), line


def test_names_of_rules_are_unique() -> None:
    names = [rule.name for rule in ALL_RULES]

    assert len(names) == len(set(names))
