"""Which linear layers of a model multiply in fp8: their forwards are replaced, each on its own module; classes, names
and parameters stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardfold.errors import ModelError
from shardfold.numerics._fp8_products import MULTIPLE, fp8_linear
from shardfold.plan.layout import Precision
from shardfold.plan.rules import EVERYTHING, Patterns
from shardfold.sharding.pickling import replace_forward, restore_forward

__all__ = ["Fp8Layers"]

ROUTERS = ("gate", "router")
"""What models call the linear layer that shares tokens out to experts."""
WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
SHOWN = 8
"""Names of a line."""
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


@runtime_checkable
class Multiplies(Protocol):
    """A forward of a linear layer that does more than to multiply, as that of one that ranks share."""

    @property
    def sides(self) -> tuple[int, int]:
        """Of the matrix that it multiplies by."""
        ...

    def multiply_by(self, product: Any) -> None:
        """It computes ``product(x, weight, bias)`` from now on; None: what the module does."""
        ...


class Fp8Layers:
    """The linear layers of a model that multiply in fp8, because its precision says so.

    Of what no rule names, the last linear layer, routers and weights that are an embedding's too are left in the dtype
    of ``compute``; in any case what computes in its own way, or with sides that are no multiples of 16.

    Args:
        model: as it is at each :meth:`attach`.
        patterns: of the rules of ``precision=``.
        precisions: of each.
        native: whether the device multiplies in fp8; else it is emulated.
    """

    def __init__(
        self, model: nn.Module, patterns: Patterns, precisions: Sequence[Precision], *, native: bool = True
    ) -> None:
        self._model, self._patterns, self._native = model, patterns, native
        self._recipes = [precision.linear for precision in precisions]
        self._attached: list[tuple[nn.Module, Any]] = []  # layers, and their forwards
        self._found: dict[str, list[str]] = {}  # names of those that do, by recipe
        self._left: dict[str, list[str]] = {}  # and of those that do not, by the reason

    def attach(self) -> None:
        """Puts forwards in the place of those of the model's layers, and takes away what was there.

        Raises:
            ModelError: there is no such layer.
        """
        self.remove()
        if not any(self._recipes):
            return
        rule, hidden = self._patterns.assign(self._model), False
        layers = {path: each for path, each in self._model.named_modules() if isinstance(each, nn.Linear)}
        embedded = {id(each.weight) for each in self._model.modules() if isinstance(each, nn.Embedding)}
        last = next(reversed(layers), None)
        for path, layer in layers.items():
            number = rule[id(layer)]
            recipe, foreign = (
                self._recipes[number],
                "weight" in layer._parameters and layer._parameters["weight"] is None,
            )
            hidden = hidden or foreign  # another rank has it
            if recipe is None or foreign:
                continue
            why = _obstacle(layer)
            if not why and self._patterns.patterns[number] == EVERYTHING:
                delicate = {
                    "the last linear layer": path == last,
                    "an embedding's weight": id(layer.weight) in embedded,
                    "a router": path.rpartition(".")[2] in ROUTERS,
                }
                why = next((why for why, holds in delicate.items() if holds), "")
            (self._left if why else self._found).setdefault(why or recipe, []).append(path or type(layer).__name__)
            if not why:
                self._put(layer, partial(fp8_linear, rowwise=recipe == "fp8-rowwise", native=self._native))
        if not self._found and not hidden:
            left = "; ".join(f"{', '.join(names[:SHOWN])}: {why}" for why, names in self._left.items())
            raise ModelError(
                f"precision= has products in fp8, and no linear layer of {type(self._model).__name__} can have them "
                f"({left or 'it has no nn.Linear'}): give precision='bf16', or name layers in a rule of their own."
            )

    def _put(self, layer: nn.Linear, product: Any) -> None:
        own = vars(layer).get("forward")
        if isinstance(own, Multiplies):
            own.multiply_by(product)
        else:
            replace_forward(layer, own := _forward(layer, product))
        self._attached.append((layer, own))

    def remove(self) -> None:
        """Gives every layer its own forward."""
        for layer, forward in self._attached:
            if isinstance(forward, Multiplies):
                forward.multiply_by(None)
            else:
                restore_forward(layer, forward)
        self._attached.clear()
        self._found.clear()
        self._left.clear()

    def described(self) -> list[str]:
        """What multiplies in fp8 and what does not, in lines of text; none where nothing is asked for."""
        how = "torch._scaled_mm" if self._native else "emulated in fp32, as the device has no such products"
        lines = [
            f"products in {recipe} ({how}): {_shown(names)}; inputs and weights e4m3, gradients e5m2"
            for recipe, names in self._found.items()
        ]
        lines += [f"  not in fp8 ({why}): {_shown(names)}" for why, names in self._left.items()]
        return [*lines, "  not in fp8: what is no nn.Linear"] if lines else []


def _forward(layer: nn.Linear, product: Any) -> Any:
    def forward(input: Tensor) -> Tensor:
        return product(input, layer.weight, layer.bias)

    # torch.compile can look into it, and finds the same in all layers whose products are alike.
    vars(forward).update(in_graphs=True, graph_key=("product", *sorted(product.keywords.items())))
    return forward


def _obstacle(layer: nn.Linear) -> str:
    """Why a layer cannot multiply in fp8; empty: it can."""
    own, weight = vars(layer).get("forward"), layer._parameters.get("weight")
    if type(layer).forward is not nn.Linear.forward or isinstance(layer, NonDynamicallyQuantizableLinear):
        return "computes in its own way"
    if own is not None and not isinstance(own, Multiplies):
        return "its forward was replaced"
    if weight is None:
        return "its weight is computed"
    if weight.dtype not in WIDTHS:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    sides = own.sides if own is not None else tuple(weight.shape)
    if any(side % MULTIPLE for side in sides):
        return f"sides are no multiples of {MULTIPLE}"
    return ""


def _shown(names: Sequence[str]) -> str:
    """Names of layers; of those of blocks that are alike one, and how many there are."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    said = [f"{short} x {len(each)}" if len(each) > 1 else each[0] for short, each in alike.items()]
    return ", ".join([*said[:SHOWN], *([f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else [])])
