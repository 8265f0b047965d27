"""How fast rows for tuning are prepared, beside the tokenizer alone, in turns.

    python benchmarks/tuning_data.py               # plain text, and chats in three templates
    python benchmarks/tuning_data.py --rows 20000 --rounds 7

Texts are pieces of Python's standard library, the tokenizer is a BPE of 8,000 tokens that is trained on some of them.
Of each kind of rows three things are timed: the tokenizer's ``encode_batch_fast`` of finished texts; for chats the same
behind rendering each conversation once, by transformers' ``apply_chat_template``; and ``prepare``, from the file of
rows to mapped files of tokens and of which are trained. Printed are medians of rounds: seconds, seconds of CPU, and
what part of the others' rate ``prepare`` reaches.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


@dataclass(frozen=True)
class Source:
    path: str
    format: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Text:
    length: int = 1024
    template: str = "model"
    train_on: Any = "assistant"


def pieces() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    found = [piece.strip() for text in texts for piece in text.split("\n\n") if 40 < len(piece.strip()) < 1500]
    random.Random(0).shuffle(found)
    return found


def tokenizer_of(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts[:4000], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin_of_text|>", eos_token="<|im_end|>", pad_token="<|eot_id|>"
    )


def templates() -> dict[str, str]:
    """Ours, and, where TRL is installed, a short and a long one of its collection."""
    found = {"chatml": CHATML}
    try:
        import trl
    except ModuleNotFoundError:
        return found
    folder = Path(str(trl.__file__)).parent / "chat_templates"
    return found | {name: (folder / f"{name}.jinja").read_text() for name in ("llama3", "qwen3")}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def case(name: str, kind: Any, rows: list[Any], tokenizer: Any, rounds: int, folder: Path) -> None:
    from shardfold.tools.tune.data.prepared import prepare
    from tests.tools.tune.support import write_rows

    file = write_rows(folder / "rows.jsonl", rows)
    encode = tokenizer.backend_tokenizer.encode_batch_fast

    def rendered() -> list[str]:
        if kind == "text":
            return [row["text"] for row in rows]
        return [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]

    def ours() -> None:
        made = prepare([Source(str(file))], tokenizer, Text(), kind, cache=folder / "cache")
        assert made.facts["rows"] == len(rows)
        made.close()

    finished = rendered()
    contenders: dict[str, Callable[[], object]] = {"tokenizer": lambda: encode(finished, add_special_tokens=False)}
    if kind == "chat":
        contenders["rendered once"] = lambda: encode(rendered(), add_special_tokens=False)
    contenders["prepare"] = ours
    seconds: dict[str, list[tuple[float, float]]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, work in contenders.items():
            shutil.rmtree(folder / "cache", ignore_errors=True)
            seconds[who].append(timed(work))
    for who, found in seconds.items():
        wall, cpu = (statistics.median(each[k] for each in found) for k in (0, 1))
        part = [statistics.median(a[k] / b[k] for a, b in zip(found, seconds["prepare"], strict=True)) for k in (0, 1)]
        said = "" if who == "prepare" else f"{100 * part[0]:>9.0f} %{100 * part[1]:>9.0f} %"
        print(f"{name:<10}{who:<16}{wall:>8.2f} s{cpu:>8.2f} s{said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    texts = pieces()
    tokenizer = tokenizer_of(texts)
    say = [texts[k % len(texts)] for k in range(2 * given.rows)]
    turns = list(zip(say[::2], say[1::2], strict=True))
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}
        for asked, told in turns
    ]
    print(f"{given.rows} rows{'':<20}time       CPU   prepare's part of that rate, by time and CPU")
    with tempfile.TemporaryDirectory() as place:
        plain = [{"text": "\n".join(each)} for each in turns]
        case("text", "text", plain, tokenizer, given.rounds, Path(place))
        for name, template in templates().items():
            tokenizer.chat_template = template
            tokenizer.eos_token = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
            case(name, "chat", chats, tokenizer, given.rounds, Path(place))


if __name__ == "__main__":
    main()
