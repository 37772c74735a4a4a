"""The errors that programs report to users and operators, each with the exit code of a program that fails with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatrain.contracts.exit_codes import ExitCode


class MegatrainError(Exception):
    """Base of all errors that a user or operator can fix: the message has the fault, where it is, and a hint."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


class ConfigError(MegatrainError):
    """One or more mistakes in the configuration, all reported at once."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{number}. {problem}" for number, problem in enumerate(self.problems, 1)))


class FlagError(ConfigError):
    """One or more mistakes in the flags of a command line, all reported at once."""

    exit_code = ExitCode.USAGE


class UsageError(MegatrainError):
    """The command line is ambiguous, or contradicts itself."""

    exit_code = ExitCode.USAGE


class NotFoundError(MegatrainError):
    """The object that the command line names does not exist."""

    exit_code = ExitCode.NOT_FOUND


class TopologyError(MegatrainError):
    """Ranks, groups or a pipeline schedule do not fit together."""

    exit_code = ExitCode.CONFIG


class DataError(MegatrainError):
    """An input file is unusable: a corpus, a tokenizer, a token file, a picture, a black box."""

    exit_code = ExitCode.DATA


class UnreachableError(DataError):
    """The storage of data does not answer, after many tries. The data may be intact."""

    exit_code = ExitCode.UNREACHABLE


class CheckpointError(MegatrainError):
    """A checkpoint is missing, incomplete or does not belong to this run."""

    exit_code = ExitCode.CHECKPOINT


class MissingFileError(CheckpointError):
    """A file of a checkpoint does not exist. That is often expected: an unfinished checkpoint has no COMMIT."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. Earlier checkpoints are intact."""

    exit_code = ExitCode.SAVE_FAILED


class NewerRoundError(CheckpointError):
    """A round has started since this process read the state, so its decision may be wrong. Nothing was changed."""


class FencedError(MegatrainError):
    """Another process owns what this process would write to. This process is superseded, or too late, and must stop.

    The run is not affected: the owner continues to train.
    """

    exit_code = ExitCode.COORDINATION


class NonFiniteError(MegatrainError):
    """Too many steps in a row had a non-finite loss or gradient norm."""

    exit_code = ExitCode.NON_FINITE


class ReplicaError(MegatrainError):
    """Ranks that must hold the same parameters hold different ones."""


class CommunicationError(MegatrainError):
    """A peer was lost, or a collective timed out."""

    exit_code = ExitCode.COMMUNICATION


class CoordinationError(MegatrainError):
    """etcd could not be reached, or refused a request. `may_have_applied`: a write was sent but not answered."""

    exit_code = ExitCode.COORDINATION

    def __init__(
        self, message: str, *, endpoints: Sequence[str] = (), key: str | None = None, may_have_applied: bool = False
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.key = key
        self.may_have_applied = may_have_applied
        super().__init__(message)


class CoordinationRefusedError(CoordinationError):
    """etcd refused this program's credentials or permissions. A retry does not help."""

    exit_code = ExitCode.NO_PERMISSION


class UnknownJobError(CoordinationError):
    """etcd is reachable but has no job of this name."""

    exit_code = ExitCode.NOT_FOUND
