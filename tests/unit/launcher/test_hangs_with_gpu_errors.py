"""The effect of a GPU error in a kernel's log on the judgment of a hang, and the evicted host."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatrain.contracts.records.host_records import GpuErrorRecord, HangEvidence, RankEvidence, RankPosition
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain_launcher.driver.hangs import ERRORS_BEFORE_S, find_culprit, gpu_faults
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.response import Facts
from megatrain_launcher.driver.responses import respond
from megatrain_launcher.health.kernel_log import gpu_error_records, recent_gpu_errors

HOSTS = ("a", "b", "c")
PARTS = tuple(RoundHost(host, f"{host}-1", host, 2 * index, 2) for index, host in enumerate(HOSTS))
ROUND = Round(3, 6, PARTS, "a", 1, "", "", 0.0)
GROUP = "dp:0+6x1"
SILENT_S = 30.0
"""The time without a record in any rank's black box when the evidence is taken."""
AT = 1000.0
POLICY = Policy(min_hosts=3, max_hosts=3, num_workers=2, feasible_counts={3: 1})

BUS = ("79", ", GPU has fallen off the bus.")
LINK = ("74", ", pid=7, NVLink: fatal error detected on link 3")
FAULT = ("31", ", pid=7, name=python3, MMU Fault: ENGINE CE0 HUBCLIENT_CE1 faulted")
CONTAINED = ("94", ", pid=7, name=python3, Contained ECC error")
REMAPPED = ("63", ", pid=7, Row Remapper: New row marked for remapping, reset gpu to activate.")
NONFATAL = ("145", ", RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x1 0x8 0x1 0x0 0x1 0x4)")
CLEAN_UP = ("45", ", pid=7, name=python3, Ch 00000008")
CAUSED = ("45", ", pid=7, name=python3, Ch 00000008 caused by previous Xid 79")
HEALTHY = ("154", ", GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
UNKNOWN = ("999", ", something that this version does not know")
Error = tuple[tuple[str, str], float]
"""Number and text of the message, and its age in seconds when the evidence is taken."""

WAITS, BEHIND, STOPPED, IDLE = "waits", "behind", "stopped", "idle"
LATE_4 = {4: BEHIND}
NOBODY: dict[int, str] = {}


@dataclass(frozen=True)
class Case:
    """The positions of the ranks (all others wait in the same collective), the errors by host, and the expected result.

    silent: hosts without evidence of ranks. checked: hosts that must pass their checks.
    """

    at: dict[int, str]
    errors: dict[str, tuple[Error, ...]]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    confidence: str
    evicted: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    says: str = ""
    silent: tuple[str, ...] = ()


def age(error: tuple[str, str], age_s: float = 35.0) -> Error:
    return error, age_s


IN_DOUBT = "of the hosts that may be at fault, only "
CASES = {
    "no error": Case(LATE_4, {}, (4,), ("c",), "certain"),
    "broken hardware where the late rank is": Case(
        LATE_4, {"c": (age(BUS),)}, (4,), ("c",), "certain", ("c",), (),
        "c reported Xid 79 of GPU PCI:0000:3b:00 (the GPU has fallen off the bus) 35 s before the evidence was taken",
    ),
    "a fault of the program there": Case(
        LATE_4, {"c": (age(FAULT),)}, (4,), ("c",), "certain", (), ("c",), "c reported Xid 31"
    ),
    "an error that ended one program there": Case(
        LATE_4, {"c": (age(CONTAINED),)}, (4,), ("c",), "certain", (), ("c",), "c reported Xid 94"
    ),
    "an unlisted number counts as hardware": Case(
        LATE_4, {"c": (age(UNKNOWN),)}, (4,), ("c",), "certain", ("c",), (), "c reported Xid 999"
    ),
    "a handled error explains nothing": Case(LATE_4, {"c": (age(REMAPPED),)}, (4,), ("c",), "certain"),
    "the text makes a number harmless": Case(LATE_4, {"c": (age(NONFATAL),)}, (4,), ("c",), "certain"),
    "consequences explain nothing": Case(LATE_4, {"c": (age(CLEAN_UP), age(CAUSED))}, (4,), ("c",), "certain"),
    "an error of long before": Case(
        LATE_4, {"c": (age(BUS, SILENT_S + ERRORS_BEFORE_S + 1),)}, (4,), ("c",), "certain"
    ),
    "the first moment that counts": Case(
        LATE_4, {"c": (age(BUS, SILENT_S + ERRORS_BEFORE_S),)}, (4,), ("c",), "certain", ("c",), (), "Xid 79"
    ),
    "an error during the hang": Case(LATE_4, {"c": (age(BUS, 0.0),)}, (4,), ("c",), "certain", ("c",), (), "Xid 79"),
    "hardware goes before a program's fault": Case(
        LATE_4, {"c": (age(FAULT, 40.0), age(LINK, 20.0))}, (4,), ("c",), "certain", ("c",), (), "c reported Xid 74"
    ),
    "an error elsewhere contradicts": Case(
        LATE_4, {"a": (age(BUS),)}, (4,), ("c",), "certain", (), ("a",),
        "before the evidence was taken; but the positions of the ranks point to c",
    ),
    "errors there and elsewhere": Case(
        LATE_4, {"a": (age(FAULT),), "c": (age(BUS),)}, (4,), ("c",), "certain", ("c",), ("a",),
        "a reported Xid 31 of GPU PCI:0000:3b:00 (memory page fault: an address that is not mapped) 35 s before the "
        "evidence was taken; it does not explain the hang",
    ),
    "a stopped process stays the culprit": Case(
        {1: STOPPED}, {"b": (age(BUS),)}, (1,), ("a",), "certain", (), ("b",), "the positions of the ranks point to a"
    ),
    "two late ranks, one with a broken GPU": Case(
        {1: BEHIND, 4: BEHIND}, {"c": (age(BUS),)}, (1, 4), ("a", "c"), "certain", ("c",), (), "c reported Xid 79"
    ),
    "a silent rank is now certain": Case(
        NOBODY, {"c": (age(BUS),)}, (4, 5), ("c",), "certain", ("c",), (), "c reported Xid 79", ("c",)
    ),
    "of two silent hosts, the one with an error": Case(
        NOBODY, {"c": (age(BUS),)}, (4, 5), ("c",), "likely", ("c",), (), "c reported Xid 79", ("b", "c")
    ),
    "two silent hosts with errors": Case(
        NOBODY, {"b": (age(FAULT),), "c": (age(BUS),)}, (2, 3, 4, 5), ("b", "c"), "certain", ("c",), ("b",),
        "b reported Xid 31", ("b", "c"),
    ),
    "all inside one collective": Case(NOBODY, {}, (), (), "weak"),
    "all inside, one GPU is broken": Case(
        NOBODY, {"b": (age(BUS),)}, (), ("b",), "likely", ("b",), (), f"{IN_DOUBT}b reported Xid 79"
    ),
    "all inside, a program's fault on one host": Case(
        NOBODY, {"b": (age(FAULT),)}, (), ("b",), "likely", (), ("b",), f"{IN_DOUBT}b reported Xid 31"
    ),
    "all inside, a handled error": Case(NOBODY, {"b": (age(REMAPPED),)}, (), (), "weak"),
    "all inside, an error of before": Case(NOBODY, {"b": (age(BUS, 500.0),)}, (), (), "weak"),
    "all inside, errors of two hosts": Case(
        NOBODY, {"a": (age(BUS),), "b": (age(LINK),)}, (), (), "weak", (), ("a", "b"), "b reported Xid 74"
    ),
    "no rank waits": Case(dict.fromkeys(range(6), IDLE), {}, (), (), "insufficient"),
    "no rank waits, one GPU is broken": Case(
        dict.fromkeys(range(6), IDLE), {"a": (age(BUS),)}, (), ("a",), "likely", ("a",), (), f"{IN_DOUBT}a reported"
    ),
}  # fmt: skip


def kernel_log(errors: tuple[Error, ...]) -> list[bytes]:
    """Return the lines of a kernel's log read at AT seconds after boot."""
    return [
        f"4,100,{round((AT - age_s) * 1e6)},-;NVRM: Xid (PCI:0000:3b:00): {number}{text}".encode()
        for (number, text), age_s in sorted(errors, key=lambda error: -error[1])
    ]


def evidence_of(case: Case) -> dict[str, HangEvidence]:
    found = {}
    for part in ROUND.hosts:
        states = {rank: case.at.get(rank, WAITS) for rank in (part.first_rank, part.first_rank + 1)}
        ranks = tuple(
            RankEvidence(
                rank, {GROUP: RankPosition(5 if state in (WAITS, STOPPED) else 4, 4)},
                "T" if state == STOPPED else "S", 7, "step", AT - SILENT_S,
            )
            for rank, state in states.items()
        )  # fmt: skip
        is_silent = part.host in case.silent
        errors = gpu_error_records(kernel_log(case.errors.get(part.host, ())), AT)
        found[part.host] = HangEvidence(
            part.host, part.session, 3, AT, {GROUP: (0, 6, 1)}, () if is_silent else ranks,
            tuple(states) if is_silent else (), gpu_errors=errors,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", CASES)
def test_gpu_errors_change_culprit_certainty_and_response(name: str) -> None:
    case = CASES[name]
    evidence = evidence_of(case)
    found = find_culprit(ROUND, evidence)

    assert (found.ranks, found.hosts, found.confidence) == (case.ranks, case.hosts, case.confidence), found.sentences
    assert case.says in "\n".join(found.sentences)
    assert case.says or "Xid" not in "\n".join(found.sentences)

    is_firm = found.is_firm
    facts = Facts(
        IncidentKind.HANG, 3, (), {rank: HOSTS[rank // 2] for rank in range(6)}, {},
        found.hosts if is_firm else (), found.ranks if is_firm else (), found.sentences[0], 7,
        gpu_faults=gpu_faults(evidence),
    )  # fmt: skip
    response = respond(facts, (), POLICY, AT)
    assert (response.cordoned, response.checked) == (case.evicted, case.checked)
    assert response.action == ("evict" if case.evicted else "restart")
    assert all(f"{host} reported Xid" in response.reason for host in case.evicted)
    assert respond(facts, (), replace(POLICY, has_health_checks=False), AT).checked == ()


def test_only_candidate_rank_on_a_host_with_an_error_is_named() -> None:
    # ranks 0, 2 and 4 are inside a collective of one rank of each host; the other ranks wait in none
    evidence = {
        host: replace(
            one, groups={"pp:0+3x2": (0, 3, 2)},
            ranks=tuple(replace(rank, positions={"pp:0+3x2": RankPosition(5, 4)}) for rank in one.ranks[:1]),
        )
        for host, one in evidence_of(CASES["all inside, one GPU is broken"]).items()
    }  # fmt: skip
    found = find_culprit(ROUND, evidence)
    assert (found.ranks, found.hosts, found.confidence) == ((2,), ("b",), "likely")


def test_error_outside_the_stuck_collective_names_no_host() -> None:
    inside = {"tp:0+2x1": RankPosition(5, 4)}
    evidence = {
        host: replace(
            one,
            groups={"tp:0+2x1": (0, 2, 1)},
            ranks=tuple(replace(rank, positions=inside if host == "a" else {}) for rank in one.ranks),
        )
        for host, one in evidence_of(CASES["all inside, one GPU is broken"]).items()
    }
    found = find_culprit(ROUND, evidence)
    assert (found.ranks, found.hosts, found.confidence) == ((), (), "weak")
    assert any("b reported Xid 79" in sentence and "does not explain" in sentence for sentence in found.sentences)


def since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def test_kernel_log_gives_the_errors_that_still_hold(tmp_path: Path) -> None:
    def numbers(*errors: Error) -> list[int]:
        return [error.number for error in gpu_error_records(kernel_log(errors), AT)]

    assert numbers(age(FAULT, 90.0), age(BUS, 80.0)) == [31, 79]
    assert numbers(age(BUS, 90.0), age(HEALTHY, 80.0), age(LINK, 70.0)) == [74]
    repeated = gpu_error_records(kernel_log((age(FAULT, 90.0), age(FAULT, 10.0))), AT)
    assert repeated == (GpuErrorRecord("PCI:0000:3b:00", 31, FAULT[1], 10.0),)
    assert gpu_error_records(kernel_log((age(FAULT, 10.0),)), AT + 4000.0) == ()

    assert recent_gpu_errors(tmp_path / "kmsg") == ()
    (tmp_path / "kmsg").write_bytes(b"".join(line + b"\n" for line in kernel_log((age(BUS, AT - since_boot_s()),))))
    assert [error.number for error in recent_gpu_errors(tmp_path / "kmsg")] == [79]


def test_large_copy_of_the_kernel_log_is_read_at_its_end(tmp_path: Path) -> None:
    link, bus = kernel_log((age(LINK, AT - since_boot_s()), age(BUS, AT - since_boot_s())))
    # the file is read in blocks of 64 KiB, and a border between two of them is in the middle of the message
    later = b"6,1,1,-;".ljust((64 << 10) - len(bus) // 2, b"x")
    with (tmp_path / "copy").open("wb") as copy:
        copy.write(link)
        copy.seek(64 << 20)
        copy.write(b"\n".join([b"", bus, later]))
    assert [error.number for error in recent_gpu_errors(tmp_path / "copy")] == [79]
