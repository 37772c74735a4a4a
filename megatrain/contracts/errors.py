"""The error classes that users and operators meet. Each knows the exit code of the program that dies of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatrain.contracts.exit_codes import ExitCode


class MegatrainError(Exception):
    """Base of all errors that are somebody's to mend: the message says what, where and how."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


class ConfigError(MegatrainError):
    """One or more mistakes in the configuration, all of them at once."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{number}. {problem}" for number, problem in enumerate(self.problems, 1)))


class FlagError(ConfigError):
    """One or more mistakes in the flags of a command line, all of them at once."""

    exit_code = ExitCode.USAGE


class UsageError(MegatrainError):
    """The command line does not say what is meant, or contradicts itself."""

    exit_code = ExitCode.USAGE


class NotFoundError(MegatrainError):
    """What the command line names is not there."""

    exit_code = ExitCode.NOT_FOUND


class TopologyError(MegatrainError):
    """Ranks, groups or a pipeline schedule do not fit together."""

    exit_code = ExitCode.CONFIG


class DataError(MegatrainError):
    """A corpus, tokenizer or token file is unusable."""

    exit_code = ExitCode.DATA


class CheckpointError(MegatrainError):
    """A checkpoint is missing, incomplete or does not belong to this run."""

    exit_code = ExitCode.CHECKPOINT


class MissingFileError(CheckpointError):
    """A file of a checkpoint is not there. Often that is an answer, not a mistake: the checkpoint has no COMMIT."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. What was saved before is whole."""

    exit_code = ExitCode.SAVE_FAILED


class FencedError(MegatrainError):
    """Somebody else holds what this process would write to: it is left behind, or came too late, and must stop.

    Nothing is wrong with the run: the holder trains.
    """

    exit_code = ExitCode.COORDINATION


class NonFiniteError(MegatrainError):
    """Too many steps in a row had a non-finite loss or gradient norm."""

    exit_code = ExitCode.NON_FINITE


class ReplicaError(MegatrainError):
    """Ranks that must hold the same parameters hold different ones."""


class CommunicationError(MegatrainError):
    """A peer was lost, or a collective did not finish in its time."""

    exit_code = ExitCode.COMMUNICATION


class CoordinationError(MegatrainError):
    """etcd could not be reached, or said no. `may_have_applied`: a write was sent and no answer came."""

    exit_code = ExitCode.COORDINATION

    def __init__(
        self, message: str, *, endpoints: Sequence[str] = (), key: str | None = None, may_have_applied: bool = False
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.key = key
        self.may_have_applied = may_have_applied
        super().__init__(message)


class CoordinationRefusedError(CoordinationError):
    """etcd refused who we are or what we may do. Trying again does not help."""

    exit_code = ExitCode.NO_PERMISSION


class UnknownJobError(CoordinationError):
    """etcd answers, and knows no job of this name."""

    exit_code = ExitCode.NOT_FOUND
