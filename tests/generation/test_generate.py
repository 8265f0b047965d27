"""``sf.generate`` on one rank: unequal prompts together give what each gives alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.generation import Continuation, Generation, SamplingRule
from tests.generation.models import alone, made, training_log_probs, unequal


def _by_request(answers: Any) -> dict[tuple[int, int], Any]:
    return {(each.request, each.sample): each for each in answers}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family, more",
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 9}),
        ("gemma2", {"sliding_window": 9}),
        ("qwen3", {}),
        ("gpt2", {}),
    ],
    ids=["llama-grouped", "llama", "mistral-window", "gemma2-softcap-window", "qwen3", "gpt2"],
)
def test_greedy_tokens_are_those_of_each_prompt_alone(family: str, more: dict[str, Any]) -> None:
    """Also twice each, of which the second copies a page, with prompts in parts, and with so few pages that texts are
    evicted and computed anew."""
    model = made(family, **more)
    prompts = unequal(12, 40)
    draw = random.Random(1)
    most = [draw.randint(1, 24) for _ in prompts]
    expected = [alone(model, prompt, tokens) for prompt, tokens in zip(prompts, most, strict=True)]
    for options in ({"n": 2}, {"page_size": 4, "pages": 40, "chunk": 11, "rows": 7}):
        found = _by_request(sf.generate(model, prompts, max_tokens=most, temperature=0, **options))
        for sample in range(options.get("n", 1)):
            assert [found[i, sample].tokens for i in range(len(prompts))] == expected
    assert model.config._attn_implementation == "sdpa" or family == "gemma2"
    assert alone(model, prompts[0], most[0]) == expected[0]


def test_texts_are_read_where_they_rest_also_behind_pages_of_others() -> None:
    """Prompts that begin alike share the pages of their begins, with which nobody's own are one run."""
    model = made()
    begin = unequal(1, 1, seed=7)[0] * 9 + [3, 5, 8]
    prompts = [[*begin, *end] for end in unequal(5, 6, seed=2)] + unequal(3, 30)
    prompts.sort(key=len)
    expected = [alone(model, prompt, 20) for prompt in prompts]
    for rows in (256, 2):  # with two under way there are more pages for each text that begins
        found = _by_request(sf.generate(model, prompts, max_tokens=20, temperature=0, page_size=4, rows=rows))
        assert [found[i, 0].tokens for i in range(len(prompts))] == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("order", ["qkv", "kqv", "qvk"])
def test_matrices_in_the_same_memory_are_told_apart(order: str, family: str) -> None:
    """Those behind each other are multiplied at once, in another order one by one."""
    model = made(family)
    for layer in model.model.layers:
        matrices = [getattr(layer.self_attn, f"{name}_proj") for name in order]
        whole = torch.cat([each.weight.data.view(-1) for each in matrices])
        for each, part in zip(matrices, whole.split([each.weight.numel() for each in matrices]), strict=True):
            each.weight.data = part.view_as(each.weight)
    prompts = unequal(4, 20)
    found = _by_request(sf.generate(model, prompts, max_tokens=9, temperature=0))
    assert [found[i, 0].tokens for i in range(4)] == [alone(model, prompt, 9) for prompt in prompts]


@pytest.mark.parametrize("where", ["mlp", "linear", "forward", "base"])
def test_what_changes_a_part_of_a_layer_acts(where: str) -> None:
    """A hook on a part, on a matrix, on the model without its head, and a forward of the user's."""
    model = made()
    prompts, layer = unequal(4, 9), model.model.layers[0]
    plain = [alone(model, prompt, 8) for prompt in prompts]
    if where == "forward":
        layer.mlp.forward = lambda hidden: -hidden
    elif where == "base":
        model.model.register_forward_hook(lambda part, inputs, out: setattr(out, "last_hidden_state", -out[0]))
    else:
        part = layer.mlp if where == "mlp" else layer.self_attn.k_proj
        part.register_forward_hook(lambda part, inputs, out: -out if out.dim() == 3 else None)
    expected = [alone(model, prompt, 8) for prompt in prompts]
    found = _by_request(sf.generate(model, prompts, max_tokens=8, temperature=0))
    assert [found[i, 0].tokens for i in range(4)] == expected != plain
    assert ("forward" in vars(layer.mlp)) == (where == "forward") and "forward" not in vars(layer)


def test_evicted_texts_go_on_exactly() -> None:
    """With pages for two texts of six, drawn and greedy; some were evicted, and the books are closed behind them."""
    model = made()
    prompts = unequal(6, 20, seed=3)
    for temperature in (0.0, 1.3):
        options: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 5}
        plain = _by_request(sf.generate(model, prompts, **options))
        tight = _by_request(sf.generate(model, prompts, page_size=4, pages=26, **options))
        for key, answer in plain.items():
            assert tight[key].tokens == answer.tokens
            assert tight[key].log_probs == pytest.approx(answer.log_probs, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.5}], ids=str)
def test_drawn_tokens_do_not_depend_on_what_else_is_in_the_batch(rule: dict[str, Any]) -> None:
    model = made()
    prompts = unequal(6, 20)
    together = _by_request(sf.generate(model, prompts, max_tokens=12, n=2, seed=list(range(6)), **rule))
    for number, prompt in enumerate(prompts):
        single = _by_request(sf.generate(model, [prompt], max_tokens=12, n=2, seed=[number], **rule))
        for sample in range(2):
            assert together[number, sample].tokens == single[0, sample].tokens
    assert together[0, 0].tokens != together[0, 1].tokens
    other = _by_request(sf.generate(model, prompts, max_tokens=12, seed=1, **rule))
    assert other[0, 0].tokens != together[0, 0].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_log_probs_are_those_of_the_training_forward(temperature: float) -> None:
    """So the ratio of a policy before its first update is one; at temperature 0 they are those of the logits."""
    model = made()
    prompts = unequal(8, 30)
    answers = _by_request(sf.generate(model, prompts, max_tokens=16, temperature=temperature, top_k=7, stop=[4, 5]))
    for (number, _), answer in answers.items():
        expected = training_log_probs(model, prompts[number], answer.tokens, temperature or 1.0)
        # Sums of 32 products of numbers near 1 in another order, and a softmax of 97.
        assert answer.log_probs == pytest.approx(expected, abs=1e-5)


def test_a_stop_token_ends_an_answer_and_is_its_last() -> None:
    model = made()
    prompts = unequal(8, 10)
    plain = _by_request(sf.generate(model, prompts, max_tokens=20, temperature=0))
    stop = plain[0, 0].tokens[3]
    for (number, _), answer in _by_request(
        sf.generate(model, prompts, max_tokens=20, temperature=0, stop=[stop])
    ).items():
        whole = plain[number, 0].tokens
        if stop in whole:
            assert answer.tokens == whole[: whole.index(stop) + 1] and answer.finish == "stop"
        else:
            assert answer.tokens == whole and answer.finish == "length"


def test_memory_is_tokens_times_bytes_and_a_page_per_text_at_most() -> None:
    """``n`` answers share a prompt's full pages."""
    model = made()
    running = Generation(model, page_size=4)
    from shardfold.generation import Continuation, SamplingRule

    prompt = list(range(3, 24))  # 21 tokens: five pages and one more
    for sample in range(6):
        running.add(Continuation(0, sample, list(prompt), 21, 9, SamplingRule(), frozenset()))
    stored = 21
    while running.busy:
        whole = running.step()
        if not whole:
            assert running.books.used == 5 + 6 * (-(-stored // 4) - 5)
            assert running.pool.nbytes == running.books.made * 1024
        stored += 1
    # keys and values, two layers, two heads of eight, four tokens, fp32
    assert running.pool.page_nbytes == 2 * 2 * 2 * 8 * 4 * 4 == 1024
    running.close()


def test_the_model_is_given_back_whenever_the_answers_are_left() -> None:
    """In training mode, with its own attention; while they are taken other forwards are refused."""
    model = made()
    model.train()
    model.model.layers[1].eval()
    answers = sf.generate(model, [[3, 4], [5, 6, 7]], max_tokens=[2, 9])
    next(answers)
    with pytest.raises(UsageError, match="take all answers"):
        model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(UsageError, match="generates already"):
        next(sf.generate(model, [[3]], max_tokens=1))
    answers.close()
    assert not any("forward" in vars(part) for part in model.modules())
    assert model.training and not model.model.layers[1].training and model.config._attn_implementation == "sdpa"
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()


def test_gradients_are_none_and_weights_unchanged() -> None:
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    list(sf.generate(model, unequal(3, 9), max_tokens=4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_our_gpt_gives_what_it_gives_alone() -> None:
    from shardfold.tools.recipes.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, d_model=32, heads=4, context=64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    prompts = unequal(6, 30)
    found = _by_request(sf.generate(model, prompts, max_tokens=12, temperature=0, page_size=4))
    for number, prompt in enumerate(prompts):
        text = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert found[number, 0].tokens == text[len(prompt) :]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"prompts": [[]]}, "prompt 0 has no tokens"),
        ({"prompts": ["text"]}, "list of token numbers"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": [1, 2]}, "one for each of 1 prompts"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"repetition": 0}, "repetition=0"),
        ({"min_p": 2}, "min_p=2"),
        ({"top_log_probs": -1}, "top_log_probs=-1"),
        ({"n": 0}, "n=0"),
        ({"stop": ["a"]}, "stop="),
        ({"pages": 0}, "pages=0"),
        ({"rows": 0}, "rows=0"),
        ({"gather": "fast"}, "gather='fast'.*\"auto\""),
        ({"temprature": 1}, "temperature"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once_by_name(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"prompts": [[3, 4]], "max_tokens": 3, **arguments}
    with pytest.raises(ConfigError, match=words):
        sf.generate(made(), **given)


def test_prompts_that_fit_neither_context_nor_pages_are_refused() -> None:
    model = made(max_position_embeddings=32)
    with pytest.raises(ConfigError, match="context is of 32"):
        list(sf.generate(model, [[3] * 20], max_tokens=13))
    with pytest.raises(ConfigError, match="pages=1"):
        list(sf.generate(model, [[3] * 20], max_tokens=3, pages=1))
    assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_are_refused_with_the_reason() -> None:
    import transformers

    with pytest.raises(ModelError, match="neither a decoder"):
        sf.generate(torch.nn.Linear(2, 2), [[1]], max_tokens=1)
    small: dict[str, Any] = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 31}
    with pytest.raises(ModelError, match="it has an encoder"):
        sf.generate(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)), [[1]], max_tokens=1)
    dynamic = made(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ModelError, match="longest text"):
        sf.generate(dynamic, [[1]], max_tokens=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_logits_that_are_not_finite_are_named(value: float, temperature: float) -> None:
    """Also those of which no token can come, whose log-probabilities would be no number; a text beside it is not."""
    model = made()
    spoilt, running = False, Generation(model)

    def spoil(_: Any, __: Any, logits: torch.Tensor) -> None:
        if spoilt:
            logits[..., -1, :] = value

    model.lm_head.register_forward_hook(spoil)
    texts = [
        Continuation(number, 0, [3, 4 + number], 2, 3, SamplingRule(temperature), frozenset()) for number in (0, 1)
    ]
    for text in texts:
        running.add(text)
    running.step()
    spoilt = True
    with pytest.raises(sf.errors.NonFiniteError, match="request 1 are inf or NaN at token 1, or -inf for all tokens"):
        running.step()
    running.abandon()
    assert len(texts[1].tokens) == 3 and all(math.isfinite(each) for text in texts for each in text.log_probs)
