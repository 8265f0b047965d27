"""A model answers over HTTP, as OpenAI's API has it: `shardfold serve`, `sf.serving`.

    with sf.serving(engine, tokenizer) as server:
        print(server.url)

Two threads: one has the sockets (``web_side``, ``_web_app``), one has the model (``answer_loop``), and nothing but
queues is between them. With several ranks all but the first follow what it says (``text_ranks``).

    answer_loop   answers jobs with the model, a token of each with every step
    api_refusal   why a request is not answered, in OpenAI's form
    api_requests  what a request asks, checked: what is not supported is refused by its name
    serve         the command: the model, the ranks, the signals
    serve_config  the settings of `shardfold serve`
    serving       an endpoint over the weights that train
    text_ranks    texts that all ranks generate together
    web_guard     what pages and other machines may not do to a server
    web_side      the sockets, in a thread of their own
    _api_replies  answers in OpenAI's form, whole or in pieces
    _endpoint     an endpoint: the sockets, what they say, and who answers
    _newest       which weights of a run are the newest, and how they come into the model
    _web_app      paths, keys, limits: from a request to a job and back
"""

from __future__ import annotations
