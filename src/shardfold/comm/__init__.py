"""Between ranks: everything that is sent goes through one :class:`shardfold.comm.comm.Comm`.

    mesh         who the other ranks are, by axis             transport   what carries tensors: Gloo, NCCL
    agreement    what all do next; waiting that ends          near        ranks of one host read each other's memory
    watchdog     where each rank is                           boards      what they tell each other there
    meter        counts what is sent                          choice      which transport there is
    encoded      what does not travel as it lies              coalesced   many tensors in one collective
    comm         all of these in one                          peers       the ranks that run one program
    cores        how many of its machine a rank has

It imports ``plan`` and ``tiers``.
"""
