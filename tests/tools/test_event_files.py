"""TensorBoard's event files are read byte for byte as they are meant, and whatever else a file holds does no harm."""

from __future__ import annotations

import math
import os
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest

from shardfold.tools.observe.event_files import EventFile, _masked_crc, event_files, last_scalars
from shardfold.tools.observe.run_page import page_of_run
from shardfold.tools.observe.run_status import RunStatus, runs_in

NAME = "events.out.tfevents.1764550000.host.1.0"


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: int | float | bytes | str, wire: int | None = None) -> bytes:
    """One field: an integer as a varint, a float as 8 bytes (``wire=5``: 4), else bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | (wire or 1)) + struct.pack("<f" if wire == 5 else "<d", value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(form: str, value: float, packed: bool) -> bytes:
    kind, values = {"f": (1, 5), "d": (2, 6), "i": (3, 7), "q": (9, 10)}[form]
    if packed:
        return field(1, kind) + field(2, b"") + field(4, struct.pack(f"<{form}", value))
    one = varint(int(value)) if form in "iq" else struct.pack(f"<{form}", value)
    return field(1, kind) + field(values, one)


def event(step: int, key: str, value: bytes, time: float = 5.0) -> bytes:
    return field(1, time) + field(2, step) + field(5, field(1, field(1, key) + value))


def scalar(step: int, key: str, value: float, time: float = 5.0) -> bytes:
    return event(step, key, field(2, float(value), wire=5), time)


def record(data: bytes) -> bytes:
    head = len(data).to_bytes(8, "little")
    return head + struct.pack("<I", _masked_crc(head)) + data + struct.pack("<I", _masked_crc(data))


def written(folder: Path, *events: bytes, name: str = NAME) -> Path:
    path = folder / name
    path.write_bytes(b"".join(map(record, (field(1, 1.0) + field(3, "brain.Event:2"), *events))))
    return path


def test_the_checksum_is_that_of_the_standard() -> None:
    """CRC-32C of the nine digits is E3069283 (RFC 3720), which records mask."""
    crc = 0xE3069283
    assert _masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("form", ["f", "d", "i", "q"])
def test_scalars_of_both_kinds_are_read(form: str, packed: bool, tmp_path: Path) -> None:
    path = written(tmp_path, scalar(-1, "loss", 0.5, 7.25), event(2**40, "a/ü", field(8, tensor(form, -3, packed))))
    assert list(EventFile(path).scalars()) == [(-1, 7.25, "loss", 0.5), (2**40, 5.0, "a/ü", -3.0)]


def test_what_is_no_scalar_is_passed_over(tmp_path: Path) -> None:
    many = field(1, 1) + field(2, field(2, field(1, 2))) + field(5, bytes(4))  # two elements, both of one value
    none = field(1, 1) + field(2, field(2, field(1, 0)))  # what the plugin of hyperparameters writes
    text = field(1, 7) + field(8, "words")
    picture = field(4, field(4, bytes(3_000_000)))
    rest = [event(1, name, field(8, each)) for name, each in (("many", many), ("none", none), ("text", text))]
    path = written(tmp_path, *rest, event(1, "picture", picture), field(6, b"tag"), scalar(2, "loss", math.inf))
    assert list(EventFile(path).scalars()) == [(2, 5.0, "loss", math.inf)]


def test_a_file_is_read_on_from_any_byte_that_it_has_grown_to(tmp_path: Path) -> None:
    """Whatever is written so far, each scalar comes once and in order, and only whole records count."""
    wanted = [(step, 5.0, "loss", float(step)) for step in range(20)]
    whole = written(tmp_path, *(scalar(step, "loss", step) for step in range(20))).read_bytes()
    grows, draw, at, found = tmp_path / f"{NAME}.grows", random.Random(0), 0, []
    reader = EventFile(grows)
    while at < len(whole):
        at = min(len(whole), at + draw.choice([1, 3, 11, 12, 13, 60]))
        grows.write_bytes(whole[:at])
        found += reader.scalars(most=draw.choice([None, 1, 100]))
        assert not reader.problem and not reader.damaged and reader.cursor <= at
    found += EventFile(grows, reader.cursor).scalars()
    assert found == wanted


def test_a_damaged_record_is_left_out_and_a_damaged_length_ends_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, *(scalar(step, "loss", step) for step in range(3)))
    whole, length = path.read_bytes(), len(record(scalar(1, "loss", 1)))
    second = len(whole) - 2 * length
    path.write_bytes(whole[: second + 20] + b"\xff" + whole[second + 21 :])
    reader = EventFile(path)
    assert [each.step for each in reader.scalars()] == [0, 2] and reader.damaged == 1
    path.write_bytes(whole[:second] + b"\xff" + whole[second + 1 :])
    reader = EventFile(path)
    assert [each.step for each in reader.scalars()] == [0]
    assert reader.cursor == second and f"byte {second}" in reader.problem


def test_noise_pipes_and_links_do_no_harm(tmp_path: Path) -> None:
    draw, path = random.Random(1), tmp_path / NAME
    for _ in range(300):  # well-framed records of anything
        path.write_bytes(
            record(draw.randbytes(draw.randrange(60))) + record(scalar(1, "loss", 2)[: draw.randrange(30)])
        )
        assert EventFile(path).cursor == 0 and all(len(each) == 4 for each in EventFile(path).scalars())
    path.write_bytes(struct.pack("<Q", 2**63) + struct.pack("<I", _masked_crc(struct.pack("<Q", 2**63))))
    assert not list(EventFile(path).scalars())  # it waits for the rest
    path.unlink()
    os.mkfifo(path)
    reader = EventFile(path)
    assert not list(reader.scalars()) and "regular" in reader.problem and last_scalars(tmp_path) == {}
    path.unlink()
    path.symlink_to(__file__)
    assert not list(reader.scalars()) and reader.problem


def test_a_folder_of_event_files_is_a_run(tmp_path: Path) -> None:
    """Of others' loops: listed with its last step and loss, also where the file is long, and with a page of its own."""
    run, evil = tmp_path / "logs" / "a", "<script>/loss"
    run.mkdir(parents=True)
    written(run, *(scalar(step, evil, 1 / step, 5.0 + step) for step in range(1, 3000)))
    written(run, scalar(3000, evil, 0.25, 6000.0), scalar(3000, "lr", math.nan), name=f"{NAME}9")
    assert list(runs_in([tmp_path])) == [run] and len(event_files(run)) == 2
    found = RunStatus.of(run)
    assert (found.state, found.step) == ("unknown", 3000) and "TensorBoard" in found.words
    assert found.last_figures[evil] == 0.25
    (run / f"{NAME}9").unlink()
    assert RunStatus.of(run).last_figures == {"step": 2999, evil: struct.unpack("<f", struct.pack("<f", 1 / 2999))[0]}
    text = page_of_run(run)
    assert "<script>" not in text and "&lt;script&gt;/loss" in text and "2999" in text


def test_what_tensorboard_writes_is_read(tmp_path: Path) -> None:
    """By PyTorch's writer, both ways."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter
    writer: Any = SummaryWriter(str(tmp_path))
    for step in range(5):
        writer.add_scalar("old", step / 2, step)
        writer.add_scalar("new", step / 4, step, new_style=True)
        writer.add_text("words", "some", step)
    writer.close()
    (path,) = event_files(tmp_path)
    found = list(EventFile(path).scalars())
    assert [(each.step, each.value) for each in found if each.key == "old"] == [(step, step / 2) for step in range(5)]
    assert [(each.step, each.value) for each in found if each.key == "new"] == [(step, step / 4) for step in range(5)]
