"""The same checkpoint on all ranks, wherever its parts are.

On one disk every rank finds all of it. Hosts that share none have a part each, and may have been broken off at
different moments of a save: each says what it has, and what is taken is the newest checkpoint of which all parts are
somewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.checkpoint.draft import hosts_said
from shardfold.checkpoint.elsewhere import Elsewhere
from shardfold.checkpoint.folders import ASIDE, DRAFT, IN_RUN, INDEX, resolve
from shardfold.checkpoint.index import Index, checksum
from shardfold.checkpoint.messages import drop, put, take, words
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.verify import Damage, index_bytes, missing_files
from shardfold.errors import CheckpointError, by_rank
from shardfold.sharding.model import ShardedModel

__all__ = ["open_together"]


@dataclass(frozen=True)
class _Version:
    """A checkpoint as it lies on one host, perhaps not all of it."""

    folder: Path
    data: bytes
    index: Index
    digest: str
    damage: tuple[Damage, ...]  # files that are not there, or not whole

    @staticmethod
    def at(folder: Path) -> _Version:
        """
        Raises:
            CheckpointError, OSError: there is none, or its index is damaged.
        """
        data = index_bytes(folder)
        index = Index.from_bytes(data, str(folder / INDEX))
        return _Version(folder, data, index, checksum(data), tuple(missing_files(folder, index)))

    def to_json(self, name: str) -> dict[str, Any]:
        absent = {each.file for each in self.damage}
        files = [number for number, file in enumerate(sorted(self.index.files)) if file not in absent]
        order = [str(self.index.written.get("time", "")), self.index.step]
        return {
            "name": name,
            "digest": self.digest,
            "order": order,
            "files": files,
            "of": len(self.index.files),
            "spread": bool(hosts_said(self.index)),
        }


def open_together(model: ShardedModel, path: str | Path, key: str) -> Checkpoint:
    """The same checkpoint on all ranks.

    Args:
        path: see :meth:`Engine.load`.
        key: of this load, in the store.

    Raises:
        CheckpointError: on all ranks, if any of them cannot read it or they see different ones.
    """
    path, found, said = Path(path), None, ""
    exchange = model.comm.job.exchange
    try:
        found = _Version.at(resolve(path))
        said = f"+{found.folder.name} {found.digest}{' in parts' if found.damage else ''}"
    except Exception as error:
        said = f"!{words(error)}"
    everyone = exchange(f"{key}/open", said)
    if found is not None and not found.damage and all(text == said for text in everyone):
        return Checkpoint.at(found.folder, found.data)
    # Something is not everywhere. Of a checkpoint that several hosts have parts of that is how it should be.
    spread = found is not None and bool(hosts_said(found.index))
    if not any(text == "+" for text in exchange(f"{key}/spread", "+" if spread else "-")):
        raise _differ(path, found, everyone, said)
    name = found.folder.name if found is not None else ""
    direct = (path / INDEX).is_file()  # the checkpoint itself was named, not the folder around it
    looked = [json.loads(text) for text in exchange(f"{key}/names", json.dumps([name, direct]))]
    there = {(each[0], each[1]) for each in looked if each[0]}
    direct_there = any(is_direct for _, is_direct in there)
    if direct_there and len(there) > 1:
        raise _differ(path, found, everyone, said)
    parents = [found.folder.parent] if found is not None else [path.parent] if direct_there else [path, path / IN_RUN]
    mine = [(each, version) for each, _ in sorted(there) for parent in parents for version in _versions(parent, each)]
    told = [
        json.loads(text)
        for text in exchange(f"{key}/versions", json.dumps([version.to_json(each) for each, version in mine]))
    ]
    chosen = _newest_whole(told)
    if chosen is None:
        raise _incomplete(path, everyone, mine, exchange(f"{key}/missing", _missing(mine)))
    return _open(model, path, key, chosen, [version for _, version in mine], told)


def _versions(parent: Path, name: str) -> Iterator[_Version]:
    """What a host has of a checkpoint of this name, whatever moment a save was broken off at."""
    for folder in (parent / name, parent / ASIDE.format(name), *sorted(parent.glob(DRAFT.format(name, "*")))):
        with suppress(CheckpointError, OSError):
            yield _Version.at(folder)


def _newest_whole(told: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """The digest of the newest checkpoint of several hosts of which each file is on some host."""
    files: dict[str, set[int]] = {}
    of: dict[str, tuple[list[Any], int]] = {}
    for version in (version for versions in told for version in versions if version["spread"]):
        files.setdefault(version["digest"], set()).update(version["files"])
        of[version["digest"]] = version["order"], version["of"]
    whole = [digest for digest, (_, count) in of.items() if len(files[digest]) == count]
    return max(whole, key=lambda digest: (of[digest][0], digest), default=None)


def _open(
    model: ShardedModel, path: Path, key: str, digest: str, mine: Sequence[_Version], told: Sequence[Any]
) -> Checkpoint:
    """Opens the version that was chosen; a rank without an index gets it from one that has it."""
    own = next((version for version in mine if version.digest == digest), None)
    having = {
        rank: next(version["files"] for version in versions if version["digest"] == digest)
        for rank, versions in enumerate(told)
        if any(version["digest"] == digest for version in versions)
    }
    first = min(having)
    store, place = model.comm.mesh.asked, f"{key}/index"
    count = 0
    if model.rank == first and own is not None:
        count = put(store, place, own.data)
    counts = model.comm.job.exchange(f"{place}/count", str(count))
    data = own.data if own is not None else take(store, place, int(counts[first]))
    model.comm.job.exchange(f"{place}/taken", "")
    if model.rank == first:
        drop(store, place, count)
    index = Index.from_bytes(data, f"the index of rank {first}")
    holders = {
        file: [rank for rank, files in having.items() if number in files]
        for number, file in enumerate(sorted(index.files))
    }
    folder = own.folder if own is not None else path
    if all(len(ranks) == model.world_size for ranks in holders.values()):
        return Checkpoint.at(folder, data)
    elsewhere = Elsewhere(
        model.comm.mesh, model.comm.agreement.timeout, own.folder if own is not None else None, holders
    )
    return Checkpoint.at(folder, data, elsewhere)


# -- sentences


def _differ(path: Path, found: _Version | None, everyone: Sequence[str], said: str) -> CheckpointError:
    """Ranks do not find one checkpoint, or none finds a complete one."""
    if len(set(everyone)) == 1:
        if found is not None:
            return CheckpointError(_not_complete(found.folder, [str(each) for each in found.damage]))
        return CheckpointError(said[1:])
    told = by_rank(everyone, lambda text: text[1:] if text[0] == "!" else f"finds {text[1:].partition(' ')[0]}")
    return CheckpointError(f"ranks do not find the same checkpoint at {path}, nothing was changed: {told}.")


def _missing(mine: Sequence[tuple[str, _Version]]) -> str:
    """What this host lacks of the first version that it has: by file, whether it is absent, and the words."""
    return json.dumps(
        {each.file: [each.what.startswith("is missing"), str(each)] for each in mine[0][1].damage} if mine else None
    )


def _incomplete(
    path: Path, everyone: Sequence[str], mine: Sequence[tuple[str, _Version]], missing: Sequence[str]
) -> CheckpointError:
    """No version has all of its parts somewhere: what no host has, in the words of one that has it damaged."""
    lacks = [said for said in map(json.loads, missing) if said is not None]
    nowhere = [file for file in lacks[0] if all(file in other for other in lacks)] if lacks else []
    if nowhere:
        words = [min(each[file] for each in lacks)[1] for file in nowhere]
        return CheckpointError(_not_complete(mine[0][1].folder if mine else path, words))
    return _differ(path, None, everyone, everyone[0])


def _not_complete(folder: Path, damage: Sequence[str]) -> str:
    more = f" and {len(damage) - 8} more" * (len(damage) > 8)
    return f"{folder} is not complete: {'; '.join(damage[:8])}{more}; take another checkpoint."
