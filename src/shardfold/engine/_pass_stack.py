"""The pass under way, on top of those that it interrupts."""

from __future__ import annotations

from shardfold.engine.pass_context import PassContext
from shardfold.engine.passes import Pass

__all__ = ["PassStack"]


class PassStack:
    """A backward inside of a forward (``torch.autograd.grad``) is a pass of its own, behind which the forward goes on.

    Attributes:
        run: the pass under way; None: none is.
        section: of the program, that it runs.
        context: of what kind it is, or what is about to run.
    """

    def __init__(self) -> None:
        self.run: Pass | None = None
        self.section = ""
        self.context = PassContext()
        self._interrupted: list[tuple[Pass, str, PassContext]] = []

    @property
    def nested(self) -> bool:
        """Whether the pass under way, or what is left when it is over, interrupts another."""
        return bool(self._interrupted)

    def prepare(self, context: PassContext) -> None:
        """What is about to run is of that kind; what runs goes on behind it."""
        if self.run is not None:
            self._interrupted.append((self.run, self.section, self.context))
        self.context = context

    def begin(self, section: str, run: Pass) -> None:
        """This one is under way."""
        self.section, self.run = section, run
        run.begin()

    def end(self) -> None:
        """The pass under way is over; its context stays."""
        self.run = None

    def go_on(self) -> bool:
        """With what was interrupted; False: nothing was, and what runs next is of no kind yet."""
        if self._interrupted:
            self.run, self.section, self.context = self._interrupted.pop()
            return True
        self.context = PassContext()
        return False

    def resume(self, section: str, run: Pass | None) -> None:
        """This pass, which another took the place of, is under way again."""
        self.section, self.run = section, run
