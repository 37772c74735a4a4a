"""The arena of a host: memory that outlives the workers and holds their newest snapshots. Standard library only.

directory.py has the file names, and creates and removes an arena; locks.py tracks the processes that use it. A slot
holds a snapshot: slot_layout.py defines its bytes, slot_file.py creates and reads it, sealed.py finds the slots with a
complete snapshot. plans.py has the workers' instructions for the writer process. megatrain.checkpoint, which needs
torch, maps and fills slots.
"""
