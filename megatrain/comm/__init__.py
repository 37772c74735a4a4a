"""Communication: the mesh and its groups, collectives, their differentiable pairs, and point-to-point channels.

Only this package of megatrain communicates through torch.distributed. Every exchange goes through a Group or a Channel.
It is recorded as a span, and a failed exchange becomes a CommunicationError that names operation, group and rank.
"""

from megatrain.comm.dry import dry_mesh
from megatrain.comm.exchange import Pending
from megatrain.comm.mesh import Mesh, create_mesh
from megatrain.comm.process import join, leave, open_rendezvous

__all__ = ["Mesh", "Pending", "create_mesh", "dry_mesh", "join", "leave", "open_rendezvous"]
