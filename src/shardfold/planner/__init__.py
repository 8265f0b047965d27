"""KNOW before you run: a model's memory and time on ranks that need not be there.

    auto           ``Engine(layout="auto")``: by states alone, and the fastest with which a micro-batch fits
    best           ``shardfold.plan.best``, the fastest way to train a model on some devices; and ``largest_batch``
    candidate      a way to train that a search looks at, as what an engine, a recipe and a DeepSpeed config take
    choice         what fits: the peak of each layout and each mode of activations, and the largest micro-batch
    division       how ranks share one model besides its states
    given          what a plan is given, a model and a micro-batch; both without memory
    hardware       what devices and links can do, as their makers print it; and what was measured on a machine
    inference      memory without training
    live           bytes of storages that operations made, as long as they live; those that formats make
    memory         bytes over time: a trace and a program, walked together as the engine walks them
    moved          activations on the host and on disk, on paper
    ranking        which ways to train fit, ranked
    repeats        models of many blocks that are alike are traced with a few of them; what the others do is repeated
    seconds        the time of a step
    setting        a rank that is planned for, and what its engine would bind for a model
    staged         stages of a rank on paper, by an order of actions
    staged_walks   walks of a model that is cut into stages
    surface        memory over time as numbers that a page computes with
    trace          what a model's forward and backward do, as values
    tracing        runs a model on tensors without memory, and notes what the engine's hooks would hear
    walks          the program walked for many micro-batches at once, each walk done once
    _gpu_kernels   what kernels of a GPU keep for backward
    _stage_traces  traces of one stage of a model

It runs the model without values and walks the program that the engine would bind. It knows no engine.
"""
