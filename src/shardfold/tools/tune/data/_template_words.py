"""What a chat template does with the words of turns: whether it writes them as they are, whatever they are.

Of such a template, text is known from words without rendering it. It is read as data flows in it: from ``messages`` to
``content``, through variables and macros, to what is written. All ways through it are taken, but those of a test whose
answer is known of words (``content is string``). What may ask for more of words than their presence ends the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["words_looked_for"]

NONE, TURNS, WORDS, SPLIT, TEXT, SPACE = range(6)
"""What an expression has: nothing of turns; turns; the words of one, as they are; a list of those alone; text with
words in it; a namespace, whose attributes are counted as one namespace's."""
_IS = {"string": True, "defined": True, "iterable": True, "sequence": True}
_IS |= dict.fromkeys(("undefined", "none", "mapping", "number", "integer", "float", "boolean", "true", "false"), False)
"""Tests, and what they say of words."""
_OWN = ("loop", "self", "super", "varargs", "kwargs", "caller")
"""Names that Jinja gives a meaning."""
_LOOP = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}


class _AsksMore(Exception):
    """Of words the template asks for what is not known beforehand."""


def words_looked_for(source: str) -> frozenset[str] | None:
    """Texts that a template looks for in turns' words.

    Args:
        source: of the template, without marks of what is generated.

    Returns:
        Words that have none of these, and no blanks at their ends, are written as they are, and change nothing else.
        None: it cannot be told, or text depends on more than turns (the time).
    """
    from jinja2 import Environment, TemplateError

    try:
        read = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        flow = _Flow()
        before = None
        while before != (before := flow.known()):  # a variable may get its words behind where it is read
            flow.run(read.body)
    except (TemplateError, _AsksMore):
        return None
    return frozenset(flow.asks)


class _Flow:
    """What variables have, and texts that are looked for."""

    def __init__(self) -> None:
        self.has: dict[str, int] = {"messages": TURNS}
        self.asks: set[str] = set()
        self.macros: dict[str, Any] = {}
        self.turns: set[str] = set()  # names that are turns of a loop
        self.assigned: set[str] = set()

    def known(self) -> object:
        """All that another reading may add to."""
        return dict(self.has), set(self.turns), set(self.assigned)

    # -- statements

    def run(self, body: Sequence[Any]) -> None:
        for node in body:
            run: Callable[[Any], None] | None = getattr(self, f"_run_{type(node).__name__.lower()}", None)
            if run is None:
                raise _AsksMore
            run(node)

    def _run_output(self, node: Any) -> None:
        for each in node.nodes:
            if type(each).__name__ != "TemplateData" and self.of(each) not in (NONE, WORDS, TEXT):
                raise _AsksMore

    def _run_if(self, node: Any) -> None:
        sure = self._truth(node.test)
        if sure is not False:
            self.run(node.body)
        if sure is not True:
            self.run([*node.elif_])
            self.run(node.else_)

    def _run_for(self, node: Any) -> None:
        over = self.of(node.iter)
        if over not in (NONE, TURNS) or node.recursive:
            raise _AsksMore
        self._set(node.target, over)
        if over == TURNS:
            self.turns.add(node.target.name)
        else:
            self.assigned.update(each.name for each in getattr(node.target, "items", [node.target]))
        if node.test is not None:
            self._asked(node.test)
        self.run(node.body)
        self.run(node.else_)

    def _run_assign(self, node: Any) -> None:
        self.assigned.add(getattr(node.target, "name", ""))
        self._set(node.target, self.of(node.node))

    def _run_assignblock(self, node: Any) -> None:
        if node.filter is not None:
            raise _AsksMore
        self.run(node.body)
        self.assigned.add(getattr(node.target, "name", ""))
        self._set(node.target, TEXT)

    def _run_macro(self, node: Any) -> None:
        self.macros[node.name] = node
        self.assigned.update(each.name for each in node.args)
        for name, default in zip(reversed(node.args), reversed(node.defaults), strict=False):
            self._set(name, self.of(default))
        self.run(node.body)

    def _run_exprstmt(self, node: Any) -> None:
        self.of(node.node)

    def _run_continue(self, node: Any) -> None: ...

    def _run_break(self, node: Any) -> None: ...

    def _set(self, target: Any, value: int) -> None:
        kind = type(target).__name__
        if kind == "Name":
            self._set_name(target.name, value)
        elif kind == "NSRef":
            self._set_name(f".{target.attr}", value)
        elif value != NONE:
            raise _AsksMore

    def _set_name(self, name: str, value: int) -> None:
        self.has[name] = _either(self.has.get(name, NONE), value)

    # -- expressions

    def of(self, node: Any) -> int:
        """What an expression has."""
        kind = type(node).__name__
        if (read := getattr(self, f"_of_{kind.lower()}", None)) is not None:
            return read(node)
        if kind not in ("Const", "TemplateData") and any(self.of(each) for each in node.iter_child_nodes()):
            raise _AsksMore
        return NONE

    def _of_name(self, node: Any) -> int:
        return self._no_more() if node.name in _OWN else self.has.get(node.name, NONE)

    def _of_getattr(self, node: Any) -> int:
        if getattr(node.node, "name", "") == "loop":
            near = node.attr in ("previtem", "nextitem")
            return TURNS if near else NONE if node.attr in _LOOP else self._no_more()
        return self._member(self.of(node.node), node.attr)

    def _of_getitem(self, node: Any) -> int:
        value, kind = self.of(node.node), type(node.arg).__name__
        if kind == "Slice" and value == TURNS:
            self._nothing(node.arg.start, node.arg.stop, node.arg.step)
            return TURNS
        key = _const(node.arg)
        if value == SPLIT and key in (0, -1):
            return WORDS
        if isinstance(key, str):
            return self._member(value, key)
        self._nothing(node.arg)
        if value == TURNS and (isinstance(key, int) or (kind in ("Add", "Sub") and _counts(node.arg))):
            return TURNS
        return self._nothing(node.node)

    def _member(self, value: int, name: str) -> int:
        if value == TURNS:
            return WORDS if name == "content" else NONE  # turns have a role and words, and no more
        if value == SPACE:
            return self.has.get(f".{name}", NONE)
        return self._no_more() if value != NONE else NONE

    def _of_filter(self, node: Any) -> int:
        value, given = self.of(node.node), [*node.args, *(each.value for each in node.kwargs)]
        if node.name == "random":
            raise _AsksMore
        if value == NONE:
            return self._nothing(*given)
        if node.name == "default" and value in (WORDS, TURNS, TEXT):
            for each in given:
                value = _either(value, self.of(each))
            return value
        self._nothing(*given)
        if node.name == "trim" and value in (WORDS, TEXT) and all(_is_blank(each) for each in given):
            return value
        if node.name == "string" and value in (WORDS, TEXT):
            return value
        if node.name in ("first", "last") and value in (SPLIT, TURNS):
            return WORDS if value == SPLIT else TURNS
        if value == TURNS and node.name in ("length", "count"):
            return NONE
        if value == TURNS and node.name == "list":
            return TURNS
        if value == TURNS and node.name in ("selectattr", "rejectattr") and given and _const(given[0]) == "role":
            return TURNS
        if node.name == "replace" and value == WORDS and len(given) == 2:
            return self._looked_for(given[0], WORDS)
        raise _AsksMore

    def _of_call(self, node: Any) -> int:
        given = [*node.args, *(each.value for each in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _AsksMore
        inner = node.node
        if type(inner).__name__ == "Name":
            return self._called(inner.name, node, given)
        if type(inner).__name__ != "Getattr" or (value := self.of(inner.node)) == NONE:
            return self._nothing(inner, *given)
        name = inner.attr
        if value == TURNS and name == "get" and given and isinstance(key := _const(given[0]), str):
            found = self._member(TURNS, key)
            for each in given[1:]:
                found = _either(found, self.of(each))
            return found
        self._nothing(*given)
        if name in ("strip", "lstrip", "rstrip") and value in (WORDS, TEXT) and all(_is_blank(each) for each in given):
            return value
        if value == WORDS and name in ("startswith", "endswith") and len(given) == 1:
            return self._looked_for(given[0], NONE)
        if value == WORDS and name in ("split", "rsplit") and given:
            return self._looked_for(given[0], SPLIT)
        if value == WORDS and name == "replace" and len(given) >= 2:
            return self._looked_for(given[0], WORDS)
        raise _AsksMore

    def _called(self, name: str, node: Any, given: Sequence[Any]) -> int:
        """Of a function by its name."""
        if name == "raise_exception":
            return NONE  # whatever it says
        if (macro := self.macros.get(name)) is not None:
            names = [each.name for each in macro.args]
            if len(node.args) > len(names) or any(each.key not in names for each in node.kwargs):
                raise _AsksMore
            for argument, each in zip(names, node.args, strict=False):
                self._set_name(argument, self.of(each))
            for each in node.kwargs:
                self._set_name(each.key, self.of(each.value))
            return TEXT
        if name == "namespace" and not node.args:
            for each in node.kwargs:
                self._set_name(f".{each.key}", self.of(each.value))
            return SPACE
        if name != "range":
            return self._no_more()
        return self._nothing(*given)

    def _of_compare(self, node: Any) -> int:
        if len(node.ops) != 1:
            return self._nothing(node.expr, *(each.expr for each in node.ops))
        [operand] = node.ops
        left, right = self.of(node.expr), self.of(operand.expr)
        if left == right == NONE:
            return NONE
        if operand.op in ("in", "notin"):
            if right == TURNS and left == NONE and isinstance(_const(node.expr), str):
                return NONE  # whether a turn has such a key
            if right == WORDS and left == NONE:
                return self._looked_for(node.expr, NONE)
            if left == WORDS and type(operand.expr).__name__ in ("List", "Tuple"):
                for each in operand.expr.items:
                    self._looked_for(each, NONE)
                return NONE
        if operand.op in ("eq", "ne") and {left, right} == {NONE, WORDS}:
            other = operand.expr if left == WORDS else node.expr
            if type(other).__name__ == "Const" and not isinstance(other.value, str):
                return NONE
            return self._looked_for(other, NONE, empty=True)
        raise _AsksMore

    def _of_test(self, node: Any) -> int:
        value = self.of(node.node)
        if value in (WORDS, TEXT) and node.name in _IS:
            return NONE
        if value == TURNS and node.name in ("defined", "undefined", "none", "string"):
            return NONE
        return self._nothing(node.node, *(node.args or ()))

    def _of_condexpr(self, node: Any) -> int:
        sure, found = self._truth(node.test), NONE
        if sure is not False:
            found = _either(found, self.of(node.expr1))
        if sure is not True and node.expr2 is not None:
            found = _either(found, self.of(node.expr2))
        return found

    def _of_not(self, node: Any) -> int:
        self._asked(node.node)
        return NONE

    def _of_and(self, node: Any) -> int:
        return _either(self.of(node.left), NONE if self._truth(node.left) is False else self.of(node.right))

    def _of_or(self, node: Any) -> int:
        return _either(self.of(node.left), NONE if self._truth(node.left) is True else self.of(node.right))

    def _of_add(self, node: Any) -> int:
        parts = {self.of(node.left), self.of(node.right)}
        if parts <= {NONE, TURNS}:
            return max(parts)
        return TEXT if parts <= {NONE, WORDS, TEXT} else self._no_more()

    def _of_concat(self, node: Any) -> int:
        parts = {self.of(each) for each in node.nodes}
        if parts == {NONE}:
            return NONE
        return TEXT if parts <= {NONE, WORDS, TEXT} else self._no_more()

    def _of_list(self, node: Any) -> int:
        parts = {self.of(each) for each in node.items}
        return max(parts, default=NONE) if parts <= {NONE, TURNS} else self._no_more()

    # -- what is asked

    def _asked(self, test: Any) -> None:
        """A test is made, of which any part may be the answer."""
        if self.of(test) in (SPLIT, SPACE):
            raise _AsksMore

    def _truth(self, test: Any) -> bool | None:
        """Whether a test holds of all words; None: it depends on other things."""
        kind = type(test).__name__
        self._asked(test)
        if kind == "Test" and test.name in _IS and self.of(test.node) == WORDS and self._always(test.node):
            return _IS[test.name]
        if kind == "Not":
            inner = self._truth(test.node)
            return None if inner is None else not inner
        if kind in ("And", "Or"):
            parts = [self._truth(each) for each in (test.left, test.right)]
            deciding = kind == "Or"
            if deciding in parts:
                return deciding
            return None if None in parts else not deciding
        return None

    def _always(self, node: Any) -> bool:
        """Whether an expression has words for sure: those of a loop's turn, or of the first or last one."""
        kind, key = type(node).__name__, getattr(node, "attr", None) or _const(getattr(node, "arg", None))
        if kind not in ("Getattr", "Getitem") or key != "content":
            return False
        inner = node.node
        if type(inner).__name__ == "Name":
            return inner.name in self.turns - self.assigned
        return type(inner).__name__ == "Getitem" and _const(inner.arg) in (0, -1) and self.of(inner.node) == TURNS

    def _looked_for(self, node: Any, then: int, *, empty: bool = False) -> int:
        text = _const(node)
        if not isinstance(text, str) or (not text and not empty):
            raise _AsksMore
        if text:
            self.asks.add(text)
        return then

    def _nothing(self, *nodes: Any) -> int:
        """Expressions that may have nothing of turns."""
        if any(self.of(each) for each in nodes if each is not None):
            raise _AsksMore
        return NONE

    def _no_more(self) -> int:
        raise _AsksMore


def _either(one: int, other: int) -> int:
    """What has one of two things."""
    if NONE in (one, other) or one == other:
        return max(one, other)
    if {one, other} == {WORDS, TEXT}:
        return TEXT
    raise _AsksMore


def _const(node: Any) -> Any:
    """The value of a constant; None: it is none."""
    if type(node).__name__ == "Neg":
        value = _const(node.node)
        return -value if isinstance(value, int) else None
    return node.value if type(node).__name__ == "Const" else None


def _counts(node: Any) -> bool:
    """Whether a sum has a number in it, so that it is one."""
    return any(isinstance(_const(each), int) for each in (node.left, node.right))


def _is_blank(node: Any) -> bool:
    text = _const(node)
    return isinstance(text, str) and text.isspace()
