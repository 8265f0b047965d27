"""What the races train: small models in the situations in which streams meet."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.optim import AdamW8bit
from tests.support.gpu.ranks import Here
from tests.support.options import grouped

__all__ = ["SCENES", "Scene", "losses_of"]

WIDTH, VOCAB, ROWS, TOKENS = 32, 64, 4, 16
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # Adam hides gradients that are wrong by a factor
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head; the mean cross entropy. With ``twice`` every block runs twice in a forward, with
    ``buffers`` there is a BatchNorm behind each."""

    def __init__(self, width: int, *, twice: bool = False, buffers: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3)) if buffers else None
        self.head = nn.Linear(width, VOCAB)
        self._twice = twice

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for place, block in enumerate([*self.blocks, *self.blocks] if self._twice else self.blocks):
            x = block(x)
            if self.norms is not None:
                x = self.norms[place % 3](x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A situation.

    Attributes:
        name: of it.
        layout: of the engine.
        engine: its other arguments.
        model: those of the model.
        accumulate: micro-batches of a step.
        ranks: the least it makes sense for.
        tolerance: relative, of losses: kernels and collectives may add in another order from run to run.
        besides: what a step does besides: ``gathered``, ``evaluate``, ``save``.
    """

    name: str
    layout: Any = "zero3"
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, bool] = field(default_factory=dict)
    accumulate: int = 1
    ranks: int = 1
    tolerance: float = 1e-5
    besides: tuple[str, ...] = ()


def _far(layout: str, tier: str) -> sf.Layout:
    return sf.PRESETS[layout].edit("moments", tier=tier)


SCENES: tuple[Scene, ...] = (
    Scene(  # far ahead: what debug compares when it frees the next unit stops the host, and orders what was before
        name="a unit gathered twice in a pass, debug=True", model={"twice": True},
        engine={"debug": True, "overlap": sf.Overlap(prefetch=3)},
    ),
    Scene(
        name="reduced gradients dropped at once, added up", accumulate=2,
        engine={"overlap": sf.Overlap(order="any", reduces_in_flight=0)},
    ),
    Scene(name="activations in host memory", engine={"activations": sf.Activations(mode="host", smallest=0)}),
    Scene(name="activations on disk", engine={"activations": sf.Activations(mode="disk", smallest=0)}),
    Scene(name="8-bit moments", layout="zero2", engine={"optimizer": partial(AdamW8bit, lr=1e-3)}),
    Scene(name="buffers that ranks share", layout="zero2", model={"buffers": True}),
    Scene(name="reduces in flight, far prefetch", engine={"overlap": sf.Overlap(prefetch=3, reduces_in_flight=1)}),
    Scene(name="parameters gathered behind their update", layout="zero1", engine={"clip_norm": 1.0}),
    Scene(name="gradients split, two micro-batches", layout="zero2", accumulate=2),
    Scene(name="casts beside the computation", layout="fsdp2", engine={"precision": "bf16"}, tolerance=2e-2),
    Scene(name="moments in host memory", layout=_far("zero2", "host"), engine={"optimizer": ADAMW}),
    Scene(
        name="gradients go down and are updated in host memory", layout="offload", accumulate=2, tolerance=2e-2,
        engine={"optimizer": ADAMW, "precision": "bf16", "clip_norm": 1.0},
    ),
    Scene(
        name="gradients stay, the update is in host memory", layout="zero2",
        engine={"optimizer": ADAMW, "offload": {"optimizer": "host"}},
    ),
    Scene(name="parameters come from host memory", layout="infinity", engine={"optimizer": ADAMW}),
    Scene(
        name="moments on disk, a thread updates", layout=_far("zero2", "disk"),
        engine={"optimizer": ADAMW, "overlap": sf.Overlap(update_thread=True)},
    ),
    Scene(name="gathered() and evaluation between steps", besides=("gathered", "evaluate")),
    Scene(name="a save beside the next step", engine={"optimizer": ADAMW}, besides=("save",)),
    Scene(name="a second copy within a node (hpz)", layout="hpz", engine={"mesh": {"intra": 2}}, ranks=4),
    Scene(name="split within a node (hsdp)", layout="hsdp", engine={"mesh": {"intra": 2}}, ranks=4),
)  # fmt: skip


def losses_of(here: Here, scene: Scene, *, steps: int, width: int = WIDTH) -> list[float]:
    """The losses of this rank; nothing asks the device for a value before the last step."""
    torch.manual_seed(7)
    with ExitStack() as held:
        engine = sf.Engine(
            Model(width, **scene.model),
            **grouped(layout=scene.layout, device=here.device, units=[Block], **{"optimizer": SGD, **scene.engine}),
            accumulate=scene.accumulate,
        )
        held.callback(engine.close)
        drawn = torch.Generator().manual_seed(100 + engine.rank)
        texts = [torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=drawn) for _ in range(steps * scene.accumulate)]
        batches = [text.to(engine.device) for text in texts]  # before the steps: a copy in one would stop the host
        losses: list[Tensor] = []
        for step in range(steps):
            for text in batches[step * scene.accumulate : (step + 1) * scene.accumulate]:
                loss = engine(text[:, :-1], text[:, 1:])
                engine.backward(loss)
                losses.append(loss.detach())
            engine.step()
            _besides(engine, scene, step, batches[0], losses, held)
        return [float(loss) for loss in losses]


def _besides(engine: sf.Engine, scene: Scene, step: int, text: Tensor, losses: list[Tensor], held: ExitStack) -> None:
    for what in scene.besides:
        BESIDES[what](engine, step, text, losses, held)


def _gathered(engine: sf.Engine, step: int, text: Tensor, losses: list[Tensor], held: ExitStack) -> None:
    with engine.gathered():
        losses.append(torch.stack([p.detach().double().sum() for p in engine.module.parameters()]).sum())


def _evaluate(engine: sf.Engine, step: int, text: Tensor, losses: list[Tensor], held: ExitStack) -> None:
    with torch.no_grad():
        losses.append(engine(text[:, :-1], text[:, 1:]))


def _save(engine: sf.Engine, step: int, text: Tensor, losses: list[Tensor], held: ExitStack) -> None:
    if step == 1:
        saving = engine.save(Path(_common_folder(engine, held)) / "step-2")
        assert saving is not None
        held.callback(saving.wait)  # before the folder goes


def _common_folder(engine: sf.Engine, held: ExitStack) -> str:
    """A folder that all ranks name alike."""
    folder = held.enter_context(tempfile.TemporaryDirectory(prefix="shardfold-gpu-"))
    names = [folder]
    if torch.distributed.is_initialized() and engine.world_size > 1:
        names = [None] * engine.world_size  # type: ignore[list-item]
        torch.distributed.all_gather_object(names, folder, group=engine.mesh.control)
    return names[0]


BESIDES: dict[str, Callable[..., None]] = {"gathered": _gathered, "evaluate": _evaluate, "save": _save}
