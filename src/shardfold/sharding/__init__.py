"""A model that is split over ranks: :class:`shardfold.sharding.model.ShardedModel` is what all else works on.

    autograd         what autograd is doing at this moment, and what it could save of a value
    buffers          buffers are rank 0's on every rank, as under DDP
    changes          whether a model still is what its units were made of
    checksums        whether bytes in memory have changed that nobody wrote, of which unit and state, on which rank
    compared         what every rank has to have alike of a model's units, as texts
    dtensor_load     DTensors of a state dict into shards: each rank gets of them what is in its own ranges
    dtensors         a model's values as DTensors, PyTorch's own word for a tensor that ranks have in parts
    forwards         methods of a model that begin a pass, besides ``forward``
    freed            parameters without memory, which say so
    gathered         whole values for a while: ``engine.gathered``
    gradient_buffer  the flat that gradients are copied into and sent from
    gradients        the gradients of one unit since the last step: where they lie, and how far they are summed
    init             what a new engine begins with: values, and the cut of the model into units
    materialize      models constructed without memory, made real unit by unit
    model            a model that is split over ranks: what works on it is given this, and nothing of who trains it
    ownership        who owns a model: one engine at a time, from when it is made until it is closed
    partition        cuts a model into units: which parameters move together
    partitioned      parameters that are split while no engine holds them
    pickling         copies and pickles of a model under an engine
    plain            values beside tensors, as JSON
    rebuild          follows a model whose structure changed between steps
    registry         which model holds a parameter
    replicas         whether parameters replicated on an axis of tensor are equal to the bit
    room             room on drives for all that will rest there
    run_state        where a run is: what a checkpoint keeps beside the model, and the counters that everybody reads
    segment          parameters of one kind, and the flat tensors they are views of
    shard            this rank's part of one state of a segment, to be read and written by ranges wherever it rests
    sharded_init     models that are split while they are built
    shared           parameters that several stages of a pipeline have, as a tied embedding and head
    shown            what users find in ``parameter.grad`` between a backward and the step, and what they do to it
    slices           parameters that are a slice of a larger one
    stand_ins        whole values in the places of parameters, for a model's own state dict code
    sums             where the sums of a unit's gradients go
    together         what reads or writes the files of this rank's disk between steps: all ranks do it, or all raise
    tree             values that hold tensors: the containers that a model's forward takes and gives
    unit             parameters that move together, in segments
    whole            whole parameters for a while, whoever holds them: engines, nobody yet, or this rank alone
    whole_segments   all values of a state that is split: of whole segments, or of single parameters
    whole_state      a model's whole values out of shards, and back: state dicts, and the names of what is in them
    _buckets         which small blocks of a list are one unit
    _coded           which frozen parameters rest as codes
    _coded_shard     this rank's part of what rests as codes, as the values that they stand for
    _hidden          ``parameter.grad`` where no rank could show the gradient itself

It imports ``comm``, ``tiers`` and ``plan``.
"""
