"""The board: a page on which runs are started, watched, compared and stopped, and that owns none of them.

A run is its own process group and its folder. What a board knows it reads from folders, and what it forgets costs
nothing: kill it, start two, move it to another port. It imports no torch; what needs it is asked of a process that is
started for it.

Every route but ``/``, ``/page/`` and ``/api/session`` needs the token: as the cookie that ``/?token=`` or
``/api/session`` sets, or as ``Authorization: Bearer``. Every POST has a JSON object as its body, and the header
``X-Shardfold-Board: 1``. A refusal is ``{"error": {"message", "param", "code"}}`` with a sentence for people. Numbers
that are not finite are ``null``. The page asks by relative paths (``api/runs``), as a proxy may have it under
``--root-path``.

    GET /                the page; /?token= sets the cookie (HttpOnly, SameSite=Strict) and leads to /
    GET /page/NAME        scripts and styles of the page; as / without a token
    POST /api/session     {"token"}: sets the cookie; 204, or 401
    GET /api/runs?after=CURSOR
                          {"cursor", "roots", "read_only", "runs": [row], "whole", "gone": [id]}: rows that changed
                          since the cursor, without it, or with one of an earlier board's, all (whole). Of a run that
                          this board started and that was refused before its first step, so that its folder is gone,
                          whatever is asked is answered with 410 and why.
                          A row: id, name, recipe ("lm", "face", "sft", ...; "": a script's), state (docs/runs.md),
                          is_over, why, step, steps (0: not known), loss (of the last step), loss_mean (of the last
                          32), held_out ({"figure": "loss" or "bits_per_byte", "value", "step"}, or null), rate
                          (tokens/s), seconds (trained), seconds_left, ranks, layout, started (seconds since 1970), age
                          (seconds since its last word, as this was answered), can (of stop, stop-now, resume, repeat,
                          chat)
    GET /api/runs/ID     the row, and: config, settings (by the names of /api/forms, where they are not the default),
                          command, toml, folder, status [{"rank" (-1: the launcher), "host", "pid", "state", "lives",
                          "step", "age", "words"}], checkpoints [{"name", "bytes", "is_latest"}], memory {tier:
                          {state: bytes}}, traffic and moved [rows of summary.json], summary, files [{"name",
                          "bytes"}], keys (of curves), samples (whether there are any), logs [rank], chat ({"url",
                          "key", "page"} of its server, or null)
    GET /api/curves?id=&id=&key=&key=&by=step|tokens|seconds&pixels=600[&from=&to=][&after=CURSOR]
                          {"cursor", "read", "series": [{"id", "key", "level", "whole", "points"}]}. A point is
                          [x, min, max, mean] of ``level`` rows, and where some of them are not finite a fifth
                          number, how many; or [x, value] of one row; null: not finite. whole: the points take the
                          place of all that was told, else they go on from there. after: the cursor of the last
                          answer to the same ids, keys and axis; only series with news are told. read below 1: files
                          are still being read, ask again at once. The list's small curves are this with pixels=60.
    GET /api/runs/ID/log?rank=0[&after=BYTE]
                          {"after", "text", "rank"}: at most 64 KiB from a byte on, without it the last ones
    GET /api/runs/ID/samples?after=BYTE
                          {"after", "samples": [{"step", "prompt", "text", "reward"}]}
    GET /api/differences?id=&id=
                          {"rows": [{"key", "values"}]} of settings that differ
    GET /api/csv?id=&key=&key=
                          text/csv of one run: step and the keys, row by row
    GET /api/forms      {"recipes": {name: {"help", "fields": [{"name", "kind", "default", "choices", "help",
                          "group", "required", "least", "most"}]}}}. kind: bool, int, float, text, path, choice, rows
                          (files, with commas), max (a number, or "max"). Names of sections have dots: adapter.rank
    POST /api/check       {"recipe", "settings"}: {"command", "toml", "errors": [{"field", "sentence"}], "measures":
                          whether a plan would measure this machine first, which takes minutes}
    POST /api/plan        {"recipe", "settings"}: {"text", "fits", "layouts": [{"layout", "fits", "bytes", "seconds"}]}
    POST /api/start       {"recipe", "settings", "name"?, "hostfile"?}: {"id"}; what /api/check finds wrong is refused
    POST /api/runs/ID/stop
                          it evaluates and saves, as at Ctrl-C: {"said"}
    POST /api/runs/ID/stop-now
                          it is ended at once: {"said"}
    POST /api/runs/ID/resume
                          {"settings"? (procs, layout, steps, ...), "name"?}: {"id"} of the run that goes on, which is
                          called after the first one; one that has done all of its steps takes more "steps"
    POST /api/runs/ID/chat
                          {"url", "key", "page"} of a server that answers with the run's weights

board           the command: the sockets and the signals
board_config    the settings of `shardfold board`
known_runs      the runs in the folders of a board, and what each is at
recipe_forms    forms of recipes: fields, and settings between forms, config files and commands
_asked_worker   the process that a board asks what needs PyTorch
_board_app      paths, the token, and what each answers
_event_rows     event files of TensorBoard's as rows of metrics.jsonl
_recipe_worker  what that process answers: whether settings hold, and what a plan says of them
_run_control    runs are started, stopped and gone on with
_run_details    what the folder of a run says of it
_run_figures    what its figures come to: last, mean, held out, how fast it goes
_run_plan       what a run takes, before it starts
_step_curves    the curves of a run, as blocks of rows
"""
