"""Whether all ranks come to a round in time, found out before anything of it is sent.

Who comes says so in the store that all ranks share. The last one decides that the round is held, and whoever has waited
for as long as it may that it is put off; the store takes the first decision, so all ranks read the same one, also those
that come later. Nobody waits for longer than that, and once a round is held all are there.
"""

from __future__ import annotations

from typing import Any

from shardfold.comm.polling import come
from shardfold.errors import CollectiveError

__all__ = ["Vote"]


class Vote:
    """Of one engine's ranks.

    Args:
        store: that all share; None: there is one rank.
        ranks: how many there are.
        deadline: seconds that one waits for the others.
    """

    def __init__(self, store: Any, ranks: int, deadline: float) -> None:
        self._store, self._ranks, self._deadline = store, ranks, deadline
        self._number = 0

    def taken(self) -> bool:
        """Whether the next outer step is taken; every rank asks once for each.

        Raises:
            CollectiveError: the store does not answer.
        """
        if self._store is None:
            return True
        self._number += 1
        try:
            return self._decided()
        except RuntimeError as error:
            raise CollectiveError(
                f"whether outer step {self._number} is taken cannot be asked of the store that all ranks share "
                f"({str(error).splitlines()[0]}): the link to the host of rank 0 is cut, or its process is gone; look "
                "at its output, and at the network between the hosts."
            ) from error

    def _decided(self) -> bool:
        came, decided = f"round/{self._number}/came", f"round/{self._number}/decided"
        if self._store.add(came, 1) == self._ranks:
            self._store.compare_set(decided, "", "held")
        if not come(self._store, [decided], self._deadline):
            self._store.compare_set(decided, "", "put off")
        return self._store.get(decided).decode() == "held"
