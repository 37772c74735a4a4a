"""The round number under which a start of the job saves. The job claims it before it reads or writes storage."""

from __future__ import annotations

from contextlib import suppress

from megatrain.checkpoint_format.claims import Claim, Claims, JobRound
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.round_starts import RoundStart, begin_round
from megatrain.comm import Mesh
from megatrain.contracts.errors import CheckpointError, FencedError


class RoundClaim:
    """A round number unique among all jobs that save to this location. Rank 0 chooses it for all ranks."""

    def __init__(self, checkpoints: Location, job_round: JobRound | None, number: int, mesh: Mesh) -> None:
        """job_round: the launcher's round, None without a launcher. number: the smallest number to try."""
        self._checkpoints = checkpoints
        self._job_round = job_round
        self._mesh = mesh
        self.number = number
        self.content = ""
        """The content of the claim; empty before `take`."""
        self.began_at_step = 0
        self.is_exclusive = True
        """Whether storage lets only one of two writers create a file; False also when that is unknown."""
        self.notes: list[str] = []
        """Messages for the log of rank 0."""

    def take(self, least: int = 0) -> None:
        """Claim a number of `least` or more.

        If storage cannot be written now, the writer on the host of rank 0 claims the number later.
        Communication: one broadcast. Raises: FencedError on every rank, when the same round or a newer
        one has claimed the location.
        """
        number, problem = max(self.number, least), ""
        claimed = Claim(number, "", 0, "", "")
        if self._mesh.rank == 0:
            try:
                claimed = Claims(self._checkpoints).take(self._job_round, number, own=self.content.encode())
            except FencedError as error:
                problem = str(error)
            except CheckpointError as error:
                claimed = Claims.unwritten(self._job_round, number)
                self.is_exclusive = False
                self.notes.append(f"WARNING: round {claimed.number} could not claim {self._checkpoints}: {error}")
        number, content, problem = self._mesh.cpu_groups.broadcast_json(
            [claimed.number, claimed.content().decode(), problem]
        )
        if problem:
            raise FencedError(problem)
        self.number, self.content = number, content

    def begin(self, branch: str, step: int) -> None:
        """Record where this round resumes. From now on, an older round's commits after that step do not count."""
        self.began_at_step = step
        if self._mesh.rank == 0 and self.is_exclusive:
            with suppress(CheckpointError):  # the writer records it again before it writes
                begin_round(self._checkpoints, RoundStart(self.number, branch, step))
            self.is_exclusive = self._checkpoints.is_exclusive()
            if not self.is_exclusive:
                self.notes.append(
                    f"WARNING: {self._checkpoints} has no exclusive creation of files; if two rounds save the same"
                    " step, the last COMMIT counts, and all files of both rounds are kept"
                )
