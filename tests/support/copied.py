"""Whether the copies that ranks hold of each other's states are what these are."""

from __future__ import annotations

import torch

import shardfold as sf

__all__ = ["differing", "misplaced"]


def differing(engine: sf.Engine) -> list[str]:
    """Parts of which the copy that this rank holds is not the original, to the bit; every rank asks. None where users
    have written originals since."""
    if engine.copying is None or not engine.copying.whole:
        return []
    found: list[str] = []
    for number, (own, copy, axis) in enumerate(engine.copying.pairs()):
        came = torch.empty_like(sent := own.read())
        engine.sharded.comm.pass_on([(sent, came)], (axis,), "a test")
        if not torch.equal(came, copy.read()):
            found.append(f"part {number}")
    return found


def misplaced(engine: sf.Engine) -> list[str]:
    """Parameters of which the copy that this rank holds is of another part than it says; every rank asks."""
    whole, updater = engine.state_dict(), engine.sharded.updater
    assert updater is not None
    found: list[str] = []
    for segment in engine.sharded.trainable():
        held = updater.copied(segment)
        assert held is not None and held.segment.master_range != segment.master_range
        for slot, place in enumerate(segment.spec.slots):
            piece, of = held.segment.own_piece(slot)
            if not torch.equal(held.segment.master[piece], whole[place.name].flatten()[of]):
                found.append(place.name)
    return found
