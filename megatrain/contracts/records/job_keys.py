"""The keys of a job in etcd. Only this module has their names.

    /megatrain/<job>/job                     JobRecord      the identity of the job; written by the first host
    /megatrain/<job>/hosts/<host>            HostRecord     leased: an executor that takes part
    /megatrain/<job>/status/<host>           HostStatus     leased: the state of its workers
    /megatrain/<job>/driver/...                             the election of the driver
    /megatrain/<job>/rounds/<number>         Round          the hosts that train, with their ranks
    /megatrain/<job>/halts/<number>          Halt           the order to stop the workers of that round
    /megatrain/<job>/deadlines/<number>      RoundDeadlines the times that limit workers without a lease
    /megatrain/<job>/evidence/<number>/<host> HangEvidence  the positions of the ranks of a stuck round
    /megatrain/<job>/commands/<number>       HostCommand    an order to executors that is neither a round nor a halt
    /megatrain/<job>/requests/<id>           JobRequest     a request to the driver, by a person or an executor
    /megatrain/<job>/answers/<id>            Answer         leased: the driver's answer to it
    /megatrain/<job>/checks/<id>/<host>      CheckReport    leased: the results of health checks
    /megatrain/<job>/cordons/<host>          Cordon         a host that no round may use
    /megatrain/<job>/incidents/<id>          Incident       an incident and its cost
    /megatrain/<job>/end                     JobEnd         the exit code with which executors end
    /megatrain/<job>/report                  DriverReport   what the driver waits for, and its alarms
    /megatrain/<job>/diag/settings           DiagSettings   what ranks record
    /megatrain/<job>/diag/daemon             DaemonRecord   leased: where the diagnostics daemon listens
    /megatrain/<job>/diag/report             DaemonReport   what that daemon receives, and its problems
    /megatrain/<job>/diag/dashboard          DashboardRecord leased: where the web page is
    /megatrain/<job>/problems/<source>       JobProblem     a problem of a part that is not a host: the job's own etcd
    /megatrain/<job>/verdicts/<id>           HostVerdict    a verdict of the diagnosis
    /megatrain/<job>/outcomes/<id>           VerdictOutcome the driver's decision on it
    /megatrain/<job>/notices/<receiver>      ReceiverRecord the state of a receiver of notifications

Only the driver writes rounds, halts, deadlines, commands, answers, incidents, end, report, outcomes and notices. Its
transactions are guarded by its election. Numbers in keys have leading zeros, so that keys sort like numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/megatrain/"
_MAX_DIGITS = 18


def key_number(text: str) -> int | None:
    """Return the number in a part of a key; None when it does not have the form of `number_text`."""
    # isdigit also accepts digits of other scripts, some of which int refuses
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
    return number if number is not None and text == number_text(number) else None


def number_text(number: int) -> str:
    """Return a number's form in a key: with leading zeros, so that keys sort like numbers."""
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

    def problem(self, source: str) -> str:
        return f"{self.prefix}problems/{source}"

    def verdict(self, verdict_id: str) -> str:
        return f"{self.prefix}verdicts/{verdict_id}"

    def outcome(self, verdict_id: str) -> str:
        return f"{self.prefix}outcomes/{verdict_id}"

    def notices(self, receiver: str) -> str:
        return f"{self.prefix}notices/{receiver}"

    def parts(self, key: str) -> tuple[str, ...]:
        """Return a key after the job's prefix, split at slashes: ("hosts", "host-3"); empty for another job's key."""
        if not key.startswith(self.prefix):
            return ()
        return tuple(key.removeprefix(self.prefix).split("/"))
