"""An order as a picture of slots, in letters."""

from __future__ import annotations

from shardfold.parallel.pipeline.simulate import Timeline, batches_of

__all__ = ["drawn"]

MARKS = {"F": " ", "B": "-", "I": "-", "W": "+"}
BEFORE = "="


def drawn(line: Timeline, ranks: int, width: int = 96) -> list[str]:
    """A row for each place: the number of the micro-batch in each slot of a forward, behind the letter of the rank's
    stage where it has several, behind a dash in those of a backward, or of its part for inputs, and behind a plus in
    those of its part for weights, or an equals sign where it is of a batch before; dots where it
    waits. Cut off behind ``width`` slots."""
    end = round(line.end)
    batches = batches_of([[action for _, action in row] for row in line.rows])
    chunks = max((action.stage for row in line.rows for _, action in row), default=0) // ranks + 1
    marks = [[" ." for _ in range(min(end, width))] for _ in line.rows]
    for row, found in zip(marks, line.rows, strict=True):
        for begin, action in found:
            letter = "abcdefgh"[action.stage // ranks % 8] if chunks > 1 and action.verb == "F" else MARKS[action.verb]
            letter = BEFORE if action.batch < 0 else letter
            digit = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[action.batch % batches % 36]
            for slot in range(round(begin), round(begin + line.times.of(action))):
                if slot < len(row):
                    row[slot] = letter + digit
    more = " ..." * (end > width)
    return [f"  {place:>2} |{''.join(row)}{more}" for place, row in enumerate(marks)]
