"""HOW: the interpreter. Events of a model come in, operations of its program go out.

    announced     what kind the passes to come are
    arguments     what an engine is given, checked first
    backward      from a loss to gradients
    consistency   arguments and settings that every rank has to have alike
    copying       copies of other ranks' states, kept what their originals are
    cursor        a thread that goes through a section of the program beside the first
    damage        updates that failed on some rank
    elastic       going on without a rank that dies
    engine        what users call
    fitting       ``layout="auto"``, with and without a micro-batch; a warning where states do not fit
    freeze        when ranks sum gradients, and when they send signs of momentum
    handlers      one for each verb
    healing       what has changed in memory by itself comes from a rank that has the same
    hooks         a model's forward and backward as events
    pace          who is slower than the others, and by what, from times that ranks tell each other on the way
    pass_context  what kind of pass runs, as a value
    passes        which operations an event of a pass brings about
    peak_rate     operations a second that a device could do
    replicated    batches and gradients that ranks along an axis of tensor have alike
    rounds        when groups of ranks that train apart come together
    runner        events in, operations out
    stats         what a step costs, as data
    step_position  where a run is in what it reads, by steps
    track         operations bound to their calls, and the one place that runs them
    _away         states that rest in host memory for a while, between steps
    _delayed      updates that go on behind their step
    _gate         when something beside the passes may be done
    _norms        the norm of gradients, clipping, overflow
    _orders       in which order units run, and the programs of it
    _parts        what runs passes and steps, made at once
    _pass_stack   the pass under way, on top of those that it interrupts
    _pipelined    a batch through the stages of a pipeline
    _quorum       which groups an outer step goes on with
    _rank_shares  how many micro-batches of a step each rank computes
    _reports      memory, traffic, times, text
    _spare        a process that waits to take the place of a rank
    _step         the optimizer step
    _tf32         TF32 switches of PyTorch while an engine lives
    _virtual_ranks  what a run reads in a step, however many ranks there are
    _visible      gradients of all units as users see them
    _vote         whether all ranks come to a round in time
    _wires        the formats in which parameters and gradients travel, chosen

It imports every room below it; nothing but the doors imports it.
"""
