"""Where everything about a job lies in etcd. The only place that knows the names of keys.

    /megatrain/<job>/job                     JobRecord      who this job is; written by the first host
    /megatrain/<job>/hosts/<host>            HostRecord     leased: an executor that takes part
    /megatrain/<job>/status/<host>           HostStatus     leased: how its workers are
    /megatrain/<job>/driver/...                             the election of the driver
    /megatrain/<job>/rounds/<number>         Round          who trains with which ranks
    /megatrain/<job>/halts/<number>          Halt           that round is over: stop its workers
    /megatrain/<job>/deadlines/<number>      RoundDeadlines what workers without a lease go by
    /megatrain/<job>/evidence/<number>/<host> HangEvidence  where the ranks of a stuck round stand
    /megatrain/<job>/commands/<number>       HostCommand    what executors shall do beside rounds
    /megatrain/<job>/requests/<id>           JobRequest     what a person asked the driver for
    /megatrain/<job>/answers/<id>            Answer         what became of that, leased
    /megatrain/<job>/checks/<id>/<host>      CheckReport    leased: what health checks found
    /megatrain/<job>/cordons/<host>          Cordon         a host that no round may use
    /megatrain/<job>/incidents/<id>          Incident       what happened, and what it cost
    /megatrain/<job>/end                     JobEnd         executors leave with this exit code
    /megatrain/<job>/report                  DriverReport   what the driver is about, and what it complains of
    /megatrain/<job>/diag/settings           DiagSettings   what ranks record
    /megatrain/<job>/diag/daemon             DaemonRecord   leased: where the diagnostics daemon listens
    /megatrain/<job>/diag/report             DaemonReport   what that daemon receives, and its troubles
    /megatrain/<job>/diag/dashboard          DashboardRecord leased: where its web page is
    /megatrain/<job>/troubles/<source>        Trouble        of a part that is no host: the job's own etcd
    /megatrain/<job>/verdicts/<id>           HostVerdict    what the diagnosis says
    /megatrain/<job>/outcomes/<id>           VerdictOutcome what the driver made of that
    /megatrain/<job>/notices/<receiver>      ReceiverRecord what a receiver of notifications knows

Everything that the driver alone writes (rounds, halts, deadlines, commands, answers, incidents, end, report, outcomes,
notices) it writes in transactions guarded by its election. Numbers in keys have leading zeros, so that the order of
keys is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/megatrain/"
_MAX_DIGITS = 18


def key_number(text: str) -> int | None:
    """Return the number that a part of a key is; None where it is none that we write."""
    # isdigit alone takes digits of all scripts, also such as int refuses
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
    return number if number is not None and text == number_text(number) else None


def number_text(number: int) -> str:
    """Return how a number stands in a key: with leading zeros, so that the order of keys is theirs."""
    return f"{number:08d}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job."""

    job: str

    @property
    def prefix(self) -> str:
        return f"{ROOT}{self.job}/"

    @property
    def record(self) -> str:
        return f"{self.prefix}job"

    @property
    def election(self) -> str:
        """The election's name; candidates' keys are below it."""
        return f"{self.prefix}driver"

    @property
    def end(self) -> str:
        return f"{self.prefix}end"

    @property
    def report(self) -> str:
        return f"{self.prefix}report"

    def directory(self, name: str) -> str:
        """Return the prefix of all keys of one kind, "hosts" for instance."""
        return f"{self.prefix}{name}/"

    def host(self, host: str) -> str:
        return f"{self.prefix}hosts/{host}"

    def status(self, host: str) -> str:
        return f"{self.prefix}status/{host}"

    def round(self, number: int) -> str:
        return f"{self.prefix}rounds/{number_text(number)}"

    def halt(self, number: int) -> str:
        return f"{self.prefix}halts/{number_text(number)}"

    def deadlines(self, number: int) -> str:
        return f"{self.prefix}deadlines/{number_text(number)}"

    def evidence(self, number: int, host: str) -> str:
        return f"{self.prefix}evidence/{number_text(number)}/{host}"

    def command(self, number: int) -> str:
        return f"{self.prefix}commands/{number_text(number)}"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}requests/{request_id}"

    def answer(self, request_id: str) -> str:
        return f"{self.prefix}answers/{request_id}"

    def check(self, check_id: str, host: str) -> str:
        return f"{self.prefix}checks/{check_id}/{host}"

    def cordon(self, host: str) -> str:
        return f"{self.prefix}cordons/{host}"

    def incident(self, incident_id: str) -> str:
        return f"{self.prefix}incidents/{incident_id}"

    @property
    def diag_settings(self) -> str:
        return f"{self.prefix}diag/settings"

    @property
    def daemon(self) -> str:
        return f"{self.prefix}diag/daemon"

    @property
    def daemon_report(self) -> str:
        return f"{self.prefix}diag/report"

    @property
    def dashboard(self) -> str:
        return f"{self.prefix}diag/dashboard"

    def trouble(self, source: str) -> str:
        return f"{self.prefix}troubles/{source}"

    def verdict(self, verdict_id: str) -> str:
        return f"{self.prefix}verdicts/{verdict_id}"

    def outcome(self, verdict_id: str) -> str:
        return f"{self.prefix}outcomes/{verdict_id}"

    def notices(self, receiver: str) -> str:
        return f"{self.prefix}notices/{receiver}"

    def parts(self, key: str) -> tuple[str, ...]:
        """Return what follows the job's prefix, cut at slashes: ("hosts", "host-3"); empty for another job's key."""
        if not key.startswith(self.prefix):
            return ()
        return tuple(key.removeprefix(self.prefix).split("/"))
