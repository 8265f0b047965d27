"""Windows are the same however they are shared out, and rows come from files once, whoever reads them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.tune.data import sources
from shardfold.tools.tune.data.batches import Batches
from shardfold.tools.tune.data.prepared import Prepared, prepare
from shardfold.tools.tune.data.rows import Labelled, Pair, Prompt, Tokens
from shardfold.tools.tune.data.show_data import show, show_file
from tests.tools.tune.support import As, From, chats, labelled, model_folder, pairs, texts, tiny_tokenizer, write_rows

pytest.importorskip("transformers")


def prepared(folder: Path, rows: list[dict[str, Any]], kind: Any = "chat", **text: Any) -> Prepared:
    file = write_rows(folder / f"{kind}.jsonl", rows)
    return prepare([From(str(file))], tiny_tokenizer(), As(**text), kind, cache=folder / "cache")


def contents(batches: Batches, windows: int) -> list[list[tuple[int, ...]]]:
    """The samples of each window, in any order."""
    found, walk = [], iter(batches)
    for _ in range(windows):
        samples = []
        for batch in next(walk).batches:
            ids, documents = batch.inputs["input_ids"], batch.documents
            samples += [tuple(ids[documents == k].tolist()) for k in range(int(documents.max()) + 1)]
        found.append(sorted(samples))
    return found


def test_a_rank_reads_for_others_too(tmp_path: Path) -> None:
    """Two ranks for three: the same batches with the same seeds, and one without rows where there is none."""
    rows = prepared(tmp_path, chats(40))
    given: dict[str, Any] = {"length": 64, "pack": False, "micro_batch": 2}
    each = [Batches(rows, **given, accumulate=2, data_rank=k, data_ranks=3) for k in range(3)]
    alone, (first, second, _) = [next(iter(one)) for one in each], each
    for one in (first, second):
        one.load_state_dict(Batches(rows, **given).state_dict())
    mine, other = first.window_of([0, 2], 2), second.window_of([1], 2)
    assert [b.rows for b in mine.batches] == [b.rows for window in (alone[0], alone[2]) for b in window.batches]
    assert [*mine.seeds] == [*alone[0].seeds, *alone[2].seeds] and len({*mine.seeds, *other.seeds}) == 8
    assert [b.rows for b in other.batches] == [*(b.rows for b in alone[1].batches), [], []]
    assert [b.trained for b in other.batches[2:]] == [0, 0] and mine.trained == alone[0].trained + alone[2].trained
    rows.close()


FACTORS = [(m, a, r) for m in (1, 2, 3, 4, 6, 12) for a in (1, 2, 3, 4, 6, 12) for r in (1, 2, 3, 4) if m * a * r == 12]


@pytest.mark.parametrize("pack", [True, False])
def test_windows_do_not_depend_on_how_they_are_shared_out(tmp_path: Path, pack: bool) -> None:
    """All factorizations of a window have the same samples in it, also the last, partial one; so has a run that goes on
    on other ranks."""
    rows = prepared(tmp_path, chats(90))
    assert len(FACTORS) >= 12
    wanted: Any = None
    for micro, accumulate, ranks in FACTORS:
        made = [
            Batches(rows, length=64, pack=pack, micro_batch=micro, accumulate=accumulate, data_rank=k, data_ranks=ranks)
            for k in range(ranks)
        ]
        number = made[0].epoch_windows
        each = [contents(one, number + 1) for one in made]
        found = [sorted(chain.from_iterable(window)) for window in zip(*each, strict=True)]
        wanted = wanted or found
        assert found == wanted
        assert all(len(one) == number + 1 for one in each)
    state, later = (Batches(rows, length=64, pack=pack, micro_batch=micro) for micro in (12, 4))
    contents(state, 1)
    later.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert sorted(chain.from_iterable(contents(later, 3))) == wanted[1]
    rows.close()


def test_an_epoch_has_each_row_once(tmp_path: Path) -> None:
    for kind, made in (("chat", chats(50)), ("pair", pairs(50)), ("label", labelled(50))):
        rows = prepared(tmp_path, made, kind)
        for pack in (True, False):
            epoch = list(Batches(rows, length=64, pack=pack, micro_batch=3, accumulate=2).epoch())
            assert sorted(row for window in epoch for batch in window.batches for row in batch.rows) == list(range(50))
            assert sum(window.trained for window in epoch) == rows.facts["trained"]
        rows.close()


def test_documents_are_cut_and_each_token_is_predicted_once(tmp_path: Path) -> None:
    made = texts(8)
    made[3]["text"] = " ".join(str(k) for k in range(200))
    rows = prepared(tmp_path, made, "text", length=32)
    windows = list(Batches(rows, length=32, pack=True, micro_batch=2).epoch())
    assert all(batch.labels.shape[1] <= 32 for window in windows for batch in window.batches)
    assert sum(window.trained for window in windows) == sum(len(row) - 1 for row in rows if isinstance(row, Tokens))
    rows.close()


def gradients(folder: Path, micro: int, accumulate: int, windows: int) -> Any:
    """Of the first or of the last, partial window, by a model that only counts tokens and their neighbours."""
    rows = prepared(folder / f"rank{torch.distributed.get_rank()}", chats(40))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(261, 8), torch.nn.Linear(8, 261))
    engine = sf.Engine(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), layout="zero2", accumulate=accumulate)
    before = {name: each.clone() for name, each in engine.state_dict().items()}
    batches = Batches(
        rows, length=64, pack=True, micro_batch=micro, accumulate=accumulate, data_rank=engine.data_rank,
        data_ranks=engine.data_ranks,
    )  # fmt: skip
    walk = iter(batches)
    window = [next(walk) for _ in range(batches.epoch_windows if windows else 1)][-1]
    for batch in window.batches:
        logits = engine(batch.inputs["input_ids"])
        total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        engine.backward(total / max(batch.trained, 1), weight=batch.trained)
        engine.step()
    after = engine.state_dict()
    engine.close()
    rows.close()
    return {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_gradients_do_not_depend_on_how_a_window_is_shared_out(ranks: Ranks, tmp_path: Path, last: bool) -> None:
    for rank in range(4):
        (tmp_path / f"rank{rank}").mkdir()
    [wanted] = ranks.run(gradients, tmp_path, 6, 1, last, world_size=1)
    for micro, accumulate, number in ((3, 2, 1), (3, 1, 2), (1, 3, 2)):
        for found in ranks.run(gradients, tmp_path, micro, accumulate, last, world_size=number):
            for name, each in wanted.items():
                assert float((found[name] - each).abs().max()) <= 1e-6, (micro, accumulate, number, name)


def steps_of(folder: Path, pack: bool, ways: list[tuple[int, int]]) -> list[Any]:
    """Loss and gradients of the first and of the last, partial window of a LLaMA, for ways to share them out."""
    from transformers import AutoModelForCausalLM

    from shardfold.tools.tune.data.packed_attention import pack_attention

    world, found = torch.distributed.get_world_size(), []
    rows = prepared(folder / f"rank{torch.distributed.get_rank()}", chats(70))
    for micro, accumulate in ways:
        for last in (False, True):
            model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
            if pack:
                pack_attention(model)
            layout = "zero3" if world > 1 else "ddp"
            engine = sf.Engine(
                model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), layout=layout, accumulate=accumulate
            )
            before = {name: each.clone() for name, each in engine.state_dict().items()}
            batches = Batches(
                rows, length=64, pack=pack, micro_batch=micro, accumulate=accumulate,
                data_rank=engine.data_rank, data_ranks=engine.data_ranks,
            )  # fmt: skip
            walk = iter(batches)
            window = [next(walk) for _ in range(batches.epoch_windows if last else 1)][-1]
            assert window.last == last
            sums = torch.zeros(2, dtype=torch.float64)
            for batch in window.batches:
                logits = engine(**batch.inputs, use_cache=False).logits
                total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
                engine.backward(total / max(batch.trained, 1), weight=batch.trained)
                engine.step()
                sums += torch.tensor([float(total.detach()), batch.trained])
            torch.distributed.all_reduce(sums)
            after = engine.state_dict()
            found.append((float(sums[0] / sums[1]), {name: before[name] - after[name] for name in before}))
            engine.close()
    rows.close()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("pack", [True, False])
def test_a_window_is_one_window_of_a_model(ranks: Ranks, tmp_path: Path, pack: bool) -> None:
    """Loss and every gradient of a LLaMA within 1e-6, over 15 ways to share out 12 rows on 1 to 4 ranks, of the first
    window and of the last, partial one."""
    model_folder(tmp_path / "base", scale=2.0)
    for rank in range(4):
        (tmp_path / f"rank{rank}").mkdir()
    wanted: list[Any] = []
    for world in (1, 2, 3, 4):
        ways = [(micro, accumulate) for micro, accumulate, number in FACTORS if number == world]
        [found, *_] = ranks.run(steps_of, tmp_path, pack, ways, world_size=world, timeout=600)
        wanted = wanted or found[:2]
        for number, (loss, gradients_of) in enumerate(found):
            expected, known = wanted[number % 2]
            assert abs(loss - expected) <= 1e-6 * max(expected, 1), (ways[number // 2], world)
            largest = max(float(each.abs().max()) for each in known.values())
            for name, each in known.items():
                apart = float((gradients_of[name] - each).abs().max())
                assert apart <= 1e-6 * max(largest, 1), (ways[number // 2], world, name, apart)


def waits(folder: Path) -> list[int]:
    """Rank 0 prepares for three times as long as anything may wait in a collective; rank 1 asks while it does."""
    import time

    from shardfold.tools.tune.data.encoding import Encoder

    rank = torch.distributed.get_rank()
    begun = folder / "begun"
    if rank == 0:
        encode = Encoder.encode

        def slow(self: Encoder, examples: Any) -> Any:
            begun.touch()
            time.sleep(6)
            return encode(self, examples)

        Encoder.encode = slow  # type: ignore[method-assign]
    while rank == 1 and not begun.exists():
        time.sleep(0.01)
    rows = prepare([From(str(folder / "chat.jsonl"))], tiny_tokenizer(), As(), "chat", cache=folder / "cache")
    batches = Batches(rows, length=64, pack=True, micro_batch=2, data_rank=rank, data_ranks=2)
    window = next(iter(batches))
    total = torch.tensor([window.trained])
    torch.distributed.all_reduce(total)
    rows.close()
    return [int(total), rank]


@pytest.mark.soak
def test_who_waits_for_rows_waits_in_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    """All collectives of this run fail after two seconds, and rows take six: a wait for rows has no limit."""
    write_rows(tmp_path / "chat.jsonl", chats(20))
    first, second = ranks.run(waits, tmp_path, world_size=2, group_timeout=2.0)
    assert first[0] == second[0] > 0


def test_kinds_of_rows(tmp_path: Path) -> None:
    pair = prepared(tmp_path, pairs(3), "pair")[0]
    assert isinstance(pair, Pair)
    start = int(np.argmax(pair.chosen.trained))
    assert pair.chosen.ids[:start].tolist() == pair.rejected.ids[:start].tolist()
    assert not pair.rejected.trained[:start].any() and pair.rejected.trained[start:].all()
    label = prepared(tmp_path, [{"prompt": "a ", "completion": "b", "label": False}], "label")[0]
    assert isinstance(label, Labelled) and not label.good
    [prompt] = prepared(tmp_path, [{"prompt": [{"role": "user", "content": "go"}], "answer": 4}], "prompt")
    assert isinstance(prompt, Prompt)
    assert tiny_tokenizer().decode(prompt.ids) == "<user>go<assistant>"
    assert prompt.fields["answer"] == 4


ALPACA = {"instruction": "say", "input": "two", "output": "yes", "history": [["a", "b"]]}
TURNS = [
    {"role": role, "content": words}
    for role, words in (("user", "a"), ("assistant", "b"), ("user", "say\ntwo"), ("assistant", "yes"))
]
SHAREGPT = {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[each["role"]], "value": each["content"]}
                              for each in TURNS]}  # fmt: skip


def test_formats_say_the_same(tmp_path: Path) -> None:
    """From every format and kind of file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    formats: list[Any] = [{"messages": TURNS}, ALPACA, SHAREGPT, {"prompt": TURNS[:3], "completion": TURNS[3:]}]
    files = [write_rows(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(formats)]
    (tmp_path / "list.json").write_text(json.dumps([formats[0]]))
    parquet.write_table(pyarrow.Table.from_pylist([formats[0]]), tmp_path / "table.parquet")
    with pyarrow.OSFile(str(tmp_path / "table.arrow"), "wb") as sink:
        table = pyarrow.Table.from_pylist([formats[2]])
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "rows.csv").write_text('instruction,input,output,history\nsay,two,yes,"[[""a"", ""b""]]"\n')
    files += [tmp_path / name for name in ("list.json", "table.parquet", "table.arrow", "rows.csv")]
    found = []
    for file in files:
        [row] = prepare([From(str(file))], tiny_tokenizer(), As(), "chat", cache=tmp_path / "cache")
        assert isinstance(row, Tokens)
        found.append((row.ids.tolist(), row.trained.tolist()))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", r"chat.jsonl:2: not JSON"),
        ('{"mesages": []}', r"chat.jsonl:2: .*Did you mean 'messages'"),
        ('{"prompt": "a", "completion": {"animal": "cat"}}', r"chat.jsonl:2: .*written as text, by json.dumps"),
        ('{"messages": [{"role": "user", "contnet": "x"}]}', r"chat.jsonl:2: messages\[0\] .*Did you mean 'content'"),
        ('{"conversations": [{"from": "hunan", "value": "x"}]}', r"chat.jsonl:2: .*Did you mean 'human'"),
        ("[1]", r"chat.jsonl:2: a row is an object"),
        ("\0", r"chat.jsonl:2: not JSON"),
        ("[" * 100_000, r"chat.jsonl:2: not JSON: maximum recursion"),
        (json.dumps({"messages": TURNS}) * 2, r"chat.jsonl:2: not JSON: Extra data"),
        ('{"messages": [{"role": "asistant", "content": "x"}]}', r"chat.jsonl:2: .*Did you mean 'assistant'"),
        (json.dumps({"messages": [{"role": "wizard", "content": "x"}, TURNS[1]]}), r"chat.jsonl:2: the role of turn 0"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', r"chat.jsonl:2: messages\[0\]: 'role' is \['user'\]"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"chat.jsonl:2: messages\[0\]: 'content' is 5"),
        ('{"messages": [{"role": "user"}]}', r"chat.jsonl:2: messages\[0\] has no 'content'"),
        ('{"conversations": [{"from": ["x"], "value": "x"}]}', r"chat.jsonl:2: .*'from' is \['x'\]"),
        ('{"conversations": [{"from": "human", "value": 5}]}', r"chat.jsonl:2: .*'value' is 5"),
        ('{"instruction": "a", "output": "b", "history": 7}', r"chat.jsonl:2: 'history' is 7"),
        ('{"instruction": "a", "output": "b", "history": [[1, 2]]}', r"chat.jsonl:2: history\[0\] is \[1, 2\]"),
        ('{"prompt": "a", "completion": "\\udc00"}', r"chat.jsonl:2: .* is half of a character"),
        ("x" * 3000, r"chat.jsonl:2: a line of 3,000 bytes, .*split it"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, said: str) -> None:
    monkeypatch.setattr(sources, "_LINE", 2000 if row.startswith("x") else sources._LINE)
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n" + row + "\n")
    rows = prepare([From(str(file))], tiny_tokenizer(), As(), "chat", cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match=said) as error:
        list(rows)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), r"a.jsonl:1: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0), r"ends in .gz, .*Unpack it"),
        ("a.json", b'[{"messages": [}]', r"a.json is no JSON"),
        ("a.json", b"[" * 100_000, r"a.json is no JSON: maximum recursion"),
        ("a.json", b'[{"instruction": "\xe9"}]', r"a.json is not UTF-8: .* byte 18"),
        ("a.json", b"[1]", r"a.json, row 1: a row is an object"),
        ("a.csv", b"instruction,output\na\n", r"a.csv:2: a row has other fields than the header"),
        ("a.csv", b"instruction,output\na,b,c\n", r"a.csv:2: a row has other fields than the header"),
        ("a.csv", b"instruction,output\na,\xe9\n", r"a.csv:\d: not UTF-8"),
        ("a.parquet", b"PAR1xxxxPAR1", r"a.parquet is no Parquet file"),
        ("a.arrow", b"xxxx", r"a.arrow is no Arrow file"),
        ("a.jsonl", b"", r"a.jsonl has no rows"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        list(prepare([From(str(tmp_path / name))], tiny_tokenizer(), As(), "chat", cache=tmp_path / "cache"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf%s\n%s", b"%s\r\n%s\r\n", b"\n%s\n\n%s"], ids=["bom", "crlf", "blank"]
)
def test_files_of_other_systems(tmp_path: Path, content: bytes) -> None:
    row = json.dumps({"messages": TURNS}).encode()
    (tmp_path / "a.jsonl").write_bytes(content % (row, row))
    rows = prepare([From(str(tmp_path / "a.jsonl"))], tiny_tokenizer(), As(), "chat", cache=tmp_path / "cache")
    assert rows.facts["rows"] == 2


def test_what_was_left_out_is_counted_and_shown(tmp_path: Path) -> None:
    made = [*chats(3), {"messages": [{"role": "user", "content": "a"}]}, {"messages": []}]
    made.append({"messages": [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "y"}]})
    rows = prepared(tmp_path, made)
    facts = rows.facts
    assert (facts["rows"], facts["empty"], facts["too_long"]) == (3, 2, 1)
    assert facts["stop"] == [tiny_tokenizer().eos_token_id]
    assert len(rows) == 6 and len(list(rows)) == 3
    text = show(rows, tiny_tokenizer(), facts=facts, color=False)
    assert "<eos>]]" in text and "2 rows left out as empty" in text
    assert "\x1b[" in show(rows, tiny_tokenizer())
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert "<eos>]]" in show_file(tmp_path / "chat.jsonl", tmp_path / "model", color=False)
    # A model's own positions bound what a run trains, so they bound what is shown of it.
    assert "1 row left out" not in show_file(tmp_path / "chat.jsonl", tmp_path / "model", color=False)
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    assert "nothing trained is within the length" in show_file(tmp_path / "chat.jsonl", tmp_path / "model", color=False)


def test_weights_of_sources(tmp_path: Path) -> None:
    """Of a source with weight 0.25 every row comes once in four epochs; with 2 twice in each."""
    a, b = (write_rows(tmp_path / f"{name}.jsonl", chats(40, seed)) for seed, name in enumerate("ab"))
    rows = prepare(
        [From(str(a), weight=0.25), From(str(b), weight=2.0)], tiny_tokenizer(), As(), "chat", cache=tmp_path / "cache"
    )
    batches, seen = Batches(rows, length=64, pack=False, micro_batch=8), []
    for _ in range(4):
        epoch = [row for window in batches.epoch() for batch in window.batches for row in batch.rows]
        assert len([row for row in epoch if row < 40]) == 10
        assert sorted(row for row in epoch if row >= 40) == sorted([*range(40, 80)] * 2)
        seen += [row for row in epoch if row < 40]
    assert sorted(seen) == list(range(40))


READER = """
import sys
from tests.tools.tune.support import As, From, tiny_tokenizer
import shardfold.tools.tune.data.prepared as module
rows = module.prepare([From(sys.argv[1])], tiny_tokenizer(), As(), "text", cache=sys.argv[2])
write, made = module._write, []
def dies(path, *rest):
    if len(made) == int(sys.argv[3]):
        path.with_suffix(".1.part").write_bytes(b"half")
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    made.append(path)
    write(path, *rest)
module._write = dies
print(sum(len(row) for row in rows), len(made))
"""


def test_the_first_row_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though two blocks are made at a time, and both have such rows."""
    monkeypatch.setattr(sources, "ROWS", 4)
    lines = [json.dumps({"text": "one two"})] * 40
    lines[8] = lines[13] = "{"
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    rows = prepare([From(str(tmp_path / "text.jsonl"))], tiny_tokenizer(), As(), "text", cache=tmp_path / "cache")
    rows.ahead([3, 2, 1, 0])
    with pytest.raises(ConfigError, match=r"text.jsonl:9: not JSON"):
        _ = rows.facts
    rows.close()


def test_killed_half_way_it_goes_on_and_is_made_once(tmp_path: Path) -> None:
    """Blocks that were written stay; what is there is not made again; another tokenizer's are others."""
    file = write_rows(tmp_path / "text.jsonl", texts(3000))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def read(dies_at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READER, str(file), str(tmp_path / "cache"), str(dies_at)]
        return subprocess.run(command, capture_output=True, check=False, text=True, env=environment, timeout=240)

    assert read(2).returncode == -9
    second = read(99)
    assert second.returncode == 0, second.stderr
    total, made = map(int, second.stdout.split())
    rows = prepare([From(str(file))], tiny_tokenizer(), As(), "text", cache=tmp_path / "cache")
    assert rows.blocks == made + 2 == 3
    assert total == sum(len(row) for row in rows if isinstance(row, Tokens)) == rows.facts["tokens"]
    other = prepare([From(str(file))], tiny_tokenizer(), As(train_on="all"), "text", cache=tmp_path / "cache")
    assert other.folder != rows.folder
