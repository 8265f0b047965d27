"""Layers and activations that are split over the ranks of an axis.

adjoint          functions of one tensor with a backward of their own
attention        how a model's attention comes to cross an axis of sequence
batch            a batch of whole sequences, and one rank's part of it
cut              which tokens of a sequence each rank has, and which parts of them attend to which
draws            random numbers of what is divided along an axis of tensor
expert_parallel  experts that are shared out over the ranks of an axis, and the tokens' way to them and back
following        code of a module's own that says sizes of whole tensors
functions        collectives of split layers, as autograd sees them
head             a classifier with a margin whose classes are split over ranks that read other samples
infer            which layers can be cut, found in a run without memory
kernels          attention of one tile, forward and backward
layer_traffic    bytes that layers cut along an axis of tensor send
lengths          what a module has in place of a whole: a part of a parameter, and numbers of its own shape
link             where ``link_of`` was, which is ``group_of`` now
model_trace      what a model does, operation by operation, without memory: a run of a copy of it on the meta device
module_group     what a module keeps of the ranks along one axis, or along all axes of data
numbers          the whole numbers among the arguments of a call: sizes of views, lengths of pieces, edges of slices
parallel         how ranks share a model: the axes of their mesh, and what is cut along which
pipeline         stages of layers
plan             which modules are cut along an axis of tensor, by words
ring             ring attention: keys and values travel from rank to rank, queries stay
same_batch       ranks along an axis of tensor share each layer, so they have to read the same batch
sequence         the axis on which ranks read other parts of the same sequences
sharding_rules   how parts of tensors go through operations
shared_input     what the columns of one parent are given, as long as its forward runs
split            modules that are cut where they stand
stream           sequence parallelism between layers that are cut
ulysses          attention by two all-to-alls, which divide heads
_graph_attention  attention over an axis of sequence as one operation of a graph
_guess           a plan of a model that brings none, by a trace
_known           the plans of models that bring one, and of some that do not
"""

from __future__ import annotations

from shardfold.parallel.attention import Attention
from shardfold.parallel.head import MarginHead
from shardfold.parallel.plan import Traced

__all__ = ["Attention", "MarginHead", "Traced"]
