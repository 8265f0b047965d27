"""A model for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), where that is installed.

    import lm_eval
    from shardfold.tools.tune.eval_config import EvalConfig
    from shardfold.tools.tune.lm_eval_model import HarnessModel

    model = HarnessModel(EvalConfig(model="runs/sft", data="-", layout="zero3"))
    found = lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Tasks and metrics are the harness's; likelihoods and answers come from the engine, on any layout. Every rank runs the
same harness with the same tasks: the ranks share out the work below it. `simple_evaluate` returns results on a host's
first rank, and `None` on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

from shardfold.errors import ConfigError
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.tune._generated import AskedPrompt, ask
from shardfold.tools.tune._likelihoods import continued, encode, scored, windows
from shardfold.tools.tune.eval_config import EvalConfig

__all__ = ["HarnessModel"]


class HarnessModel(TemplateLM):
    """What the harness asks of a model.

    Args:
        config: as of ``shardfold eval``; `data` is not read.
    """

    def __init__(self, config: EvalConfig) -> None:
        super().__init__()
        self.config = config
        self.evaluated = OpenedModel.open(config)
        self.tokenizer = self.evaluated.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.evaluated.first
        if first is None:
            raise ConfigError(
                "the tokenizer has neither bos_token nor eos_token, so a text has nothing in front of it."
            )
        return first

    @property
    def max_length(self) -> int:
        return self.evaluated.context

    @property
    def tokenizer_name(self) -> str:
        return str(self.config.model)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode(self.evaluated, string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        sequences = [continued(self.evaluated, before, ids) for _, before, ids in requests]
        scores = scored(self.evaluated, sequences, self.config)
        return [(each.log_prob, each.greedy) for each in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each text, from its first token on."""
        parts = [windows(self.evaluated, encode(self.evaluated, request.args[0])) for request in requests]
        scores = iter(scored(self.evaluated, [window for part in parts for window in part], self.config))
        return [math.fsum(next(scores).log_prob for _ in part) for part in parts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """One answer to each prompt, cut before the first of the texts that end it.

        Raises:
            ConfigError: a task asks for sampling other than by a temperature and ``top_p``.
        """
        found: list[str] = [""] * len(requests)
        groups: dict[tuple[int, float, float], list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(_sampling(request.args[1], self.config.max_tokens), []).append(place)
        for (longest, temperature, top_p), places in groups.items():
            config = self.config.model_copy(
                update={"max_tokens": longest, "temperature": temperature or 1.0, "top_p": top_p}
            )
            room = self.evaluated.context - longest
            prompts = [
                AskedPrompt(encode(self.evaluated, requests[place].args[0])[-max(1, room) :], "", None)
                for place in places
            ]
            prompts = [each if each.ids else replace(each, ids=[self.prefix_token_id]) for each in prompts]
            answers = ask(self.evaluated, prompts, config, n=1, greedy=temperature == 0)
            for place, answer in zip(places, answers, strict=True):
                found[place] = _cut(answer[0].text, requests[place].args[1].get("until"))
        return found

    def close(self) -> None:
        """Close the engine."""
        self.evaluated.close()


KNOWN = ("until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p")


def _sampling(given: dict[str, Any], longest: int) -> tuple[int, float, float]:
    """Tokens at most, temperature (0: greedy) and ``top_p`` that a task asks for."""
    unknown = [name for name in given if name not in KNOWN]
    if unknown:
        raise ConfigError(f"a task generates with {unknown[0]!r}, which is not known: there are {', '.join(KNOWN)}.")
    longest = int(given.get("max_gen_toks", given.get("max_new_tokens", longest)))
    temperature = float(given.get("temperature", 1.0 if given.get("do_sample") else 0.0))
    drawn = given.get("do_sample", temperature > 0)
    return longest, temperature if drawn else 0.0, float(given.get("top_p", 1.0))


def _cut(text: str, until: str | Sequence[str] | None) -> str:
    for end in [until] if isinstance(until, str) else until or ():
        if end:
            text = text.split(end, maxsplit=1)[0]
    return text
