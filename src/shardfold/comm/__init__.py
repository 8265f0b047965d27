"""Between ranks: everything that is sent goes through one :class:`shardfold.comm.comm.Comm`.

    agreement          what all ranks do next; waiting that ends
    answered           the shared store, asked for no longer than a collective may take
    backend            what carries tensors of a device; how ``torch.distributed`` is started with it
    coalesced          many tensors in one collective
    comm               one rank's way to the others: everything that is sent goes through it
    cores              cores of the machine that a rank computes on
    device_mesh        ``torch.distributed.DeviceMesh``: read as ``parallel=``, and made
    dtypes             dtypes of a table as PyTorch's
    epoch_watch        what a rank waits for ends with its epoch
    expected           what ranks expect to do next, from what followed the last times
    hops               collectives in two hops: over nodes, and over the ranks of each
    launcher_notes     what a rank leaves for its launcher: why it fails, and how far it came
    links              seconds that collectives and formats take, measured
    membership         who takes part in a run, in one epoch after the other
    mesh               the ranks by axis, and every process group
    mesh_group         the ranks along axes of the mesh, as layers and optimizers ask them
    meter              bytes handed to collectives and moved between tiers
    peers              the ranks of one program, and the small messages of all of them
    polling            waiting for keys of the shared store, so that it can end
    run_pairs          process groups of this rank and one of another run
    runtime            the device of a rank, how long ranks wait for each other, and checks that cost time
    shared_folders     folders in shared memory, by the process that made them
    transport          plain collectives of ``torch.distributed``
    _block_sum         a sum of what comes from several ranks, block by block
    _boards            what ranks of one host tell each other in memory, and waiting for it
    _connecting        connections between the ranks of groups
    _connection        one connection to another rank: what goes over it, and what comes
    _dispatcher        who goes on with what is under way over connections
    _encoded           collectives of values that are encoded on the link
    _futex             sleeping on a word of memory that processes share
    _near              ranks of one host read each other's memory
    _neighbours        the ranks whose memory this one can read
    _second_line       a second connection to a store, for when the first one is silent
    _shown_traceback   what is shown of an error by which a rank ends
    _sockets           ranks send each other what is for them, over connections of their own
    _transport_choice  which transport carries an engine's data
    _watchdog          who is stuck, and where
    _words             small messages in memory that ranks of one host share

It imports ``plan`` and ``tiers``.
"""
