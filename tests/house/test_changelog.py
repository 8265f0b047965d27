"""The changelog is for people who use Shardfold: one section for each version, short, nothing in it twice."""

from __future__ import annotations

import re
from pathlib import Path

import shardfold

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
LONGEST = 200
"""Lines of one version's section."""


def test_nothing_stands_in_it_twice() -> None:
    """Two branches that add lines are merged by keeping both, which may keep old ones too."""
    lines = [line for line in TEXT.splitlines() if len(line) > 20]
    assert not sorted({line for line in lines if lines.count(line) > 1})


def test_each_version_has_one_short_section() -> None:
    """What is not released, then dated versions, the newest first, each in the kinds of Keep a Changelog."""
    names, dates, bodies = zip(*RELEASES, strict=True)
    assert names[0] == "Unreleased" and len(set(names)) == len(names)
    assert all(dates[1:]) and list(dates[1:]) == sorted(dates[1:], reverse=True)
    for name, body in zip(names, bodies, strict=True):
        kinds = re.findall(r"^### (.*)$", body, re.MULTILINE)
        assert kinds == sorted(set(kinds) & set(KINDS), key=KINDS.index), name
        assert body.count("\n") <= LONGEST, f"{name} has {body.count(chr(10))} lines: is it a list of commits?"


def test_the_version_is_in_it_and_in_the_citation() -> None:
    """A version of development (``.dev``) has no section yet."""
    version = shardfold.__version__
    assert "dev" in version or version in {name for name, *_ in RELEASES}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(version.partition('.dev')[0])}$", citation, re.MULTILINE)
