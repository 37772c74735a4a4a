"""One process per host reads each step once for all ranks of the host, into a ring that they map. No torch.

plan.py: what the ranks of a host need. ring_layout.py, slot_content.py: the bytes of the ring. ring.py: its words,
which synchronize loader and ranks. decision.py: what to read next. process.py: the program. host_loader.py: the
interface for a rank.
"""
