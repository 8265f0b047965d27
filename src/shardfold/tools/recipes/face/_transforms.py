"""Changes of images by torchvision's v2 transforms, where it is installed; they draw from PyTorch's generator."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.tools.extras import sentence
from shardfold.tools.recipes.face.face_config import FaceConfig

__all__ = ["change_of"]


def change_of(config: FaceConfig) -> Callable[[Tensor], Tensor] | None:
    """How images are changed; None: in this recipe's own way.

    Raises:
        ConfigError: torchvision is asked for, and cannot be imported.
    """
    if config.transforms == "own" or not config.augment:
        return None
    try:
        from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]
    except Exception as error:  # one for another torch fails as it likes
        missing = sentence("--transforms torchvision", error) if isinstance(error, ModuleNotFoundError) else None
        raise ConfigError(
            f"{missing}."
            if missing
            else f"--transforms torchvision: the torchvision that is there is for another torch "
            f"({type(error).__name__}): install shardfold[vision] from where torch came, or leave the option out."
        ) from None
    return v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomAffine(degrees=8, translate=(0.06, 0.06), scale=(0.92, 1.08), fill=0.0),
            v2.GaussianNoise(sigma=0.05, clip=False),
            v2.RandomErasing(p=0.3, scale=(0.04, 0.12), value="random"),
        ]
    )
