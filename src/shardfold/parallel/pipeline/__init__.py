"""Stages of layers: which pieces of a model are whose, what flows between them, and what brings it there.

action          one thing that a rank does in a pipeline
ahead           orders in which batches overlap
costs           what the pieces of a model cost: time and memory, measured one piece at a time
deferred        gradients of weights that are computed apart from those of inputs, and later
flow            what flows between the pieces of a model: found in one run in which pieces compute shapes only
micro_batches   a batch as its micro-batches, and what is computed of one
open            the stages of a new engine, and what its optimizer keeps of them
parts           which units of a rank each of its stages has
picture         an order as a picture of slots, in letters
pieces          the pieces of a model, between which it may be cut into stages
point_to_point  activations and their gradients on their way between neighbouring stages
simulate        an order gone through without a model
stage_order     in which order ranks run the forwards and backwards of their stages, and what they send between them
stages          which stage has which pieces, and what crosses the borders between stages
stash           weights of earlier steps, for micro-batches that are under way while weights are updated
underway        micro-batches that are under way, also from one batch to the next where an order asks for that
watch           what a rank does of its time while a batch goes through the stages
_around         buffers of the modules around the pieces, which forward writes
_inturn         orders in which ranks do a forward and a backward in turn, behind some forwards ahead of them
_order_text     the text of an order: a line for each rank, with what it does in turn
_vshape         orders of stages in the shape of a V
"""
