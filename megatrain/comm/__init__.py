"""Communication: the mesh and its groups, collectives, their differentiable pairs, and point-to-point channels.

The only package that touches torch.distributed. Every message passes a Group, which knows its peers, records a span
and turns a failed exchange into a CommunicationError that names operation, group and rank.
"""

from megatrain.comm.channel import Channel
from megatrain.comm.dry_mesh import dry_mesh
from megatrain.comm.group import Group
from megatrain.comm.mesh import Mesh, create_mesh
from megatrain.comm.process import join, leave, meet
from megatrain.comm.queue import Pending

__all__ = ["Channel", "Group", "Mesh", "Pending", "create_mesh", "dry_mesh", "join", "leave", "meet"]
