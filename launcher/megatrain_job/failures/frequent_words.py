"""Words of ordinary lines. As anchors of a rule (`shapes`) they would make every line a candidate."""

from __future__ import annotations

_TEXT = """
a about access accessed active address after all allocate allocated and another are array at attempt available
background bad barrier batch be been before being bin block blocked broken buffer but by cache call called calling
can cannot check checkpoint clients closed code collective collectives complete completed connect connected
connection controller core could count cpu cuda data dataloader dataset death default detected dev device did died
different disabled disk distributed does down driver due dump during either empty enabled ended entire error errors
event exceeded exception exit exited expected fail failed failure failures false fault file files for found free
from get got gpu gpus grad gradient group had has have header health host idx if illegal image in inf info
information initialized input instance internal invalid is it item iteration job key keys killed last latest launch
limit line link load loaded local loss lost low master match max maximum mem memory metadata might minimum missing
model module more mount mounted must name nan nccl net network no node norm not number object of on one only open
operation or other out output over page parameter peer pending pid pod poll port power process processes rank ranks
raw reached read received record recv remote reset resource result retry rpc running runtime sample samples save
scale send server set shard shared should signal size skipping socket source start started state statement status
step steps stop stopped storage store stream success such system table tar task temperature tensor test text than
the then there this thread time timed timeout timestamp to token tokens torch total train training transport trial
tried try type unable unit until update use used user using valid value values version via wait waiting wandb warn
warning was watch when while will with without work worker workers write written wrong xla yet you your
"""

FREQUENT_WORDS = frozenset(_TEXT.split())

_OF_EVERY_LINE = """
batch grad gpu host info iteration loss nccl node norm rank sample samples step time token tokens torch
"""

WORDS_OF_EVERY_LINE = frozenset(_OF_EVERY_LINE.split())
"""The least suitable anchors of all."""
