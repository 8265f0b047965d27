"""`shardfold doctor` finds what is wrong, says how to mend it, and writes a profile that plans read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from shardfold.planner.hardware import cluster
from shardfold.testing import Ranks
from shardfold.tools.doctor import _diagnoses, _forward_rates
from shardfold.tools.doctor._diagnoses import Check, checks
from shardfold.tools.doctor._rates import at_least_zero
from shardfold.tools.doctor.doctor import doctor


def by_what() -> dict[str, Check]:
    return {each.what: each for each in checks() if each.state not in ("ok", "none")}


def test_what_is_wrong_has_a_way_to_mend_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder for temporary files that is not there, and more threads than cores; what is ok has none."""
    monkeypatch.setattr(_diagnoses, "leads_home", lambda name: False)
    found = list(checks())
    assert {each.state for each in found} <= {"ok", "none", "slow", "bad"}
    good = {each.what: each.mend for each in found if each.state == "ok"}
    assert "host name" in good and not any(good.values())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("OMP_NUM_THREADS", str(64 * len(os.sched_getaffinity(0))))
    wrong = by_what()
    assert wrong["temporary files"].state == "bad" and "TMPDIR" in wrong["temporary files"].mend
    assert wrong["threads"].state == "slow" and all(each.mend for each in wrong.values())


def test_a_name_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection to PyTorch's store waits for it; doctor itself does not."""
    answered = threading.Event()
    monkeypatch.setattr(_diagnoses, "QUICK", float("inf"))
    assert "names of addresses" not in by_what()
    monkeypatch.setattr(_diagnoses, "QUICK", 0.0)
    monkeypatch.setattr(_diagnoses, "ASKED", 0.05)
    with patch("socket.getnameinfo", lambda *_: answered.wait()):
        found = by_what()["names of addresses"]
    answered.set()
    assert found.state == "slow" and "takes more than 0.1 s" in found.said and "RES_OPTIONS" in found.mend


def test_a_package_that_lacks_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In what is printed, where brackets are no marks of rich's. A package is looked up by the module that it has."""
    looked: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: looked.append(name) or (None if name == "timm" else 1))
    doctor(None, as_json=False)
    said = capsys.readouterr().out
    assert "timm is not installed" in said and "pip install 'shardfold[vision]' for what needs it" in said
    assert said.split()[0] == "none" or "\nnone" in said
    assert "costs speed; not installed on request: 1 package.\n" in said.replace("cost speed", "costs speed")
    assert "PIL" in looked and "pillow" not in looked


def _forwards_together() -> None:
    small = {"ROWS": (1, 3), "WIDE": 128, "LAYERS": 2, "LONG": 40, "KEPT_WIDTH": 128, "KEPT_LAYERS": 2, "STEPS": 1}
    with patch.multiple(_forward_rates, BASES={4: "nf4/64"}, **small):
        found, kept = _forward_rates.forward_rates(2), _forward_rates.kept_rate(2)
    assert set(found) == {"fp32", "nf4/64"} and kept >= 0
    assert all(weight > 0 <= block for rows in found.values() for _, block, weight in rows)


@pytest.mark.soak
def test_forwards_are_measured_of_two_processes_that_share_layers(ranks: Ranks) -> None:
    """Both make equally many, whatever each of them takes for one."""
    ranks.run(_forwards_together, world_size=2)


@pytest.mark.soak
def test_the_machine_is_measured_into_a_profile_that_plans_read(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    command = [sys.executable, "-m", "shardfold", "doctor", "--measure", str(path), "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert result.returncode in (0, 1), result.stderr
    assert any(each["what"] == "versions" for each in json.loads(result.stdout))
    two = cluster(f"2x{path}")
    assert two.size == 2 and two.device.flops["fp32"] > 0 and two.device.near.rate > 0 and two.device.disk > 0
    assert two.device.attention["bf16"] > 0 and two.device.others > 0
    assert set(two.device.codecs) >= {"int8/256", "int8/64", "nf4/64", "int2/32"}  # of wires, and of weights at rest
    assert two.device.update > 0
    for seen in (two.device.forwards, two.device.cut_forwards):
        assert set(seen) == {"fp32", "int8/64", "nf4/64", "int2/32"}
        assert all(texts and weight > 0 <= block for rows in seen.values() for texts, block, weight in rows)
    assert two.device.kept > 0 < two.device.cut_kept


@pytest.mark.soak
def test_a_profile_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardfold", "doctor", "--measure", str(tmp_path / "no/here.json")]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "is not a folder" in result.stderr


def test_what_operations_take_is_fitted_and_never_below_nothing() -> None:
    """Steps of two and of six units, which say what an operation, a collective and a meeting take. What noise would
    make negative is 0, and the rest is fitted without it."""
    counts = [[18, 3, 3], [36, 9, 3], [42, 7, 3], [84, 21, 3]]
    took = [2e-4 * all_of + 5e-4 * sends + 1e-3 * meets for all_of, sends, meets in counts]
    assert at_least_zero(counts, took) == pytest.approx([2e-4, 5e-4, 1e-3])
    less = [each - 1e-3 * sends for each, (_, sends, _) in zip(took, counts, strict=True)]
    operation, collective, meeting = at_least_zero(counts, less)
    assert collective == 0 and operation > 0 and meeting > 0
    assert at_least_zero(counts, [-1.0] * 4) == [0.0, 0.0, 0.0]
