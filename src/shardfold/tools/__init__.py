"""Commands, and what they are made of.

    answering     what `generate`, `chat` and `serve` share
    bench         the benchmark: layouts and peers that take turns
    board         a page on which runs are started, watched, compared and stopped
    cli           the command `shardfold`
    cli_ckpt      the commands `shardfold ckpt`: look into checkpoints, check them, carry them out and in
    cli_options   options of commands that are made of settings, and settings as options again
    cli_plan      the command `shardfold plan`
    cli_run       the command `shardfold run`: its options are those of :class:`shardfold.launch.options.Options`
    cli_tune      the commands `shardfold tune`
    doctor        what is wrong with an installation, and what this machine can do
    effects       options that would do nothing under the others
    entry         where the command begins; says what is not installed
    extras        what is installed only on request
    interruption  Ctrl-C of the command, from its start on
    named_optimizers  optimizers by the names that options have for them
    observe       what a run shows and leaves behind: metrics as data, progress on the terminal, pictures
    onnx          models as ONNX, compared with their source, in few bits
    packages      models of other packages by a name
    planning      the command `shardfold plan`: models by name, what fits where, as text
    quick_start   what lets a command begin sooner
    recipes       complete trainings to run, read and copy: `lm` trains a byte-level GPT on any text
    run_attempts  what ranks of a run do together, taken again where one of them dies
    run_engine    what runs of every recipe ask of their engine
    serve         a model answers over HTTP: `shardfold serve`
    stop_signal   the signals that end a run at a step, and not within one
    tune          fine-tuning of transformers models: recipes, their settings, the run
    _cli_board    the command `shardfold board`: its options are the fields of its settings
    _cli_serve    the command `shardfold serve`: its options are the fields of its settings
    _explained    what ``shardfold explain --config`` prints

It may import anything but ``testing``.
"""
