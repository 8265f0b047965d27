"""A model that is split over ranks: :class:`shardfold.sharding.model.ShardedModel` is what all else works on.

    segment      parameters of one kind in one flat           model         the whole, its gate and its updater
    shard        this rank's part of one state of these, wherever it rests
    unit         segments that move together                  run_state     where training is
    gradients    of a unit; gradient_buffer                   registry      which model holds a parameter
    shown        what is in parameter.grad; hidden            ownership     one engine at a time
    freed        parameters without memory; pickling          changes       whether the model is what it was; rebuild
    partition    which are a unit; groups; boxes              gathered      whole values for a while; whole, loans
    distinct     of which parameters each rank has others
    materialize  first values; buffers                        whole_state   state dicts; whole_segments
    room         of all that will rest on disk
    sharded_init models that are split while they are built; partitioned    forwards  methods besides forward
    tree, plain                                               values that hold tensors; such values as JSON
    autograd                                                  what autograd is doing

It imports ``comm``, ``tiers`` and ``plan``.
"""
