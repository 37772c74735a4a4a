"""The number under which a start of the job saves: claimed in storage before anything is read or written there."""

from __future__ import annotations

from contextlib import suppress

from megatrain.comm import Mesh
from megatrain.contracts.claims import Claim, Claims, JobRound
from megatrain.contracts.errors import CheckpointError, FencedError
from megatrain.contracts.location import Location
from megatrain.contracts.round_starts import RoundStart, begin_round


class RoundClaim:
    """A number that no other round has, of this job or another one that saves here; rank 0 chooses it for all ranks."""

    def __init__(self, checkpoints: Location, job_round: JobRound | None, number: int, mesh: Mesh) -> None:
        """job_round: which round of the launcher this is, None without one. number: the one to begin with."""
        self._checkpoints = checkpoints
        self._job_round = job_round
        self._mesh = mesh
        self.number = number
        self.content = ""
        """Of the claim; empty before `take`."""
        self.began_at_step = 0
        self.is_exclusive = True
        """Whether of two writers of a new file one wins; False also where that is unknown."""
        self.notes: list[str] = []
        """What is to be said, on rank 0."""

    def take(self, least: int = 0) -> None:
        """Take a number of `least` or more.

        Where storage takes nothing now, the writer of the coordinator's host claims it later.
        Communication: one broadcast. Raises: FencedError on every rank, when a newer round has come.
        """
        number, problem = max(self.number, least), ""
        told = Claim(number, "", 0, "", "")
        if self._mesh.rank == 0:
            try:
                told = Claims(self._checkpoints).take(self._job_round, number, own=self.content.encode())
            except FencedError as error:
                problem = str(error)
            except CheckpointError as error:
                told = Claims.unwritten(self._job_round, number)
                self.is_exclusive = False
                self.notes.append(f"WARNING: round {told.number} could not claim {self._checkpoints}: {error}")
        number, content, problem = self._mesh.host.broadcast_json([told.number, told.content().decode(), problem])
        if problem:
            raise FencedError(problem)
        self.number, self.content = number, content

    def begin(self, branch: str, step: int) -> None:
        """Say where this round goes on: what an older one commits from now on beyond that step counts for nothing."""
        self.began_at_step = step
        if self._mesh.rank == 0 and self.is_exclusive:
            with suppress(CheckpointError):  # the writer says it again before it writes
                begin_round(self._checkpoints, RoundStart(self.number, branch, step))
            self.is_exclusive = self._checkpoints.is_exclusive()
            if not self.is_exclusive:
                self.notes.append(
                    f"WARNING: {self._checkpoints} cannot refuse to replace a file that is there already; should two"
                    " rounds save the same step, the last COMMIT counts, and all that either of them wrote is kept"
                )
