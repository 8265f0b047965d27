"""Every line that orders streams is in the list of those that are tried out one by one."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import device_cases, synchronizations
from tests.support.mutants import WrongFault
from tests.support.synchronizations import WAYS

SOURCE = """
def gather(self, side, flat, event):
    side.wait_stream(self.compute)
    with self.memory.side():
        self.comm.agreement.wait(self.begin())
    self.comm.agreement.wait(self.say(), control=True)
    self.buffers.synchronize(False)
    self.process.wait()
    return partial(flat.arrive, self.agreement.wait)
"""


def test_every_synchronization_is_listed() -> None:
    """A new line that orders streams comes with what goes wrong without it (`tests/support/synchronizations.toml`)."""
    assert synchronizations.not_listed(synchronizations.read()) == []


def test_one_that_is_not_listed_is_named() -> None:
    """Of a list without one entry, its line is told."""
    entries = [entry for entry in synchronizations.read() if "NaN of debug" not in entry.what]
    [told] = synchronizations.not_listed(entries)
    assert told.startswith("tiers/device.py:") and told.endswith("after_compute")


def test_what_counts_as_one() -> None:
    """Waits of streams and of collectives do, also those that are handed on; messages between hosts and processes do
    not."""
    found = [(line, name) for line, name in synchronizations.synchronizations(ast.parse(SOURCE))]
    assert sorted(found) == [(3, "wait_stream"), (4, "side"), (5, "agreement.wait"), (9, "agreement.wait")]


def test_entries_fit() -> None:
    """Each has a case that there is, and says why it has none, or why less than all finds it."""
    entries = synchronizations.read()
    assert len({entry.what for entry in entries}) == len(entries)
    for entry in entries:
        if entry.case:
            device_cases.named(entry.case)
        else:
            assert not entry.found, entry.what
    with pytest.raises(WrongFault, match="must be there exactly once"):
        synchronizations.not_listed([replace(entries[0], old="return 1 / 0")])


def test_a_list_that_is_wrong_is_refused(tmp_path: Path) -> None:
    """A way that does not exist, or a missing reason, is told at once."""
    path = tmp_path / "list.toml"
    text = '[[synchronization]]\nwhat = "x"\nfile = "x"\nold = "a"\nnew = "b"\ncase = "zero3"\n'
    for more in ('found = ["checks"]', 'found = ["check"]', 'because = "x"\nfond = []'):
        path.write_text(text + more)
        with pytest.raises(WrongFault):
            synchronizations.read(path)
    path.write_text(f"{text}found = {list(WAYS)}")
    assert len(synchronizations.read(path)) == 1
