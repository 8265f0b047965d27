"""The face model: a vision transformer, a neck with batch normalization, and a head of classes with a margin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.nn import SyncBatchNorm
from shardfold.parallel import Attention, MarginHead
from shardfold.tools.effects import without_effect
from shardfold.tools.packages import config_of_type, package_of, timm_model
from shardfold.tools.recipes.face.face_config import FaceConfig

__all__ = ["FaceModel", "ViT", "backbone_of"]


class SelfAttention(nn.Module):
    """Of all patches to all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = Attention(heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))


class EncoderBlock(nn.Module):
    """Pre-norm, as ViT's (arXiv 2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def stem(channels: int, patch: int, width: int) -> nn.Module:
    """Images to one vector for each patch; where sides are powers of two, by convolutions that halve them, with which a
    ViT learns from fewer images (arXiv 2106.14881)."""
    halvings = patch.bit_length() - 1
    if patch != 1 << halvings or patch == 1:
        return nn.Conv2d(channels, width, patch, patch)
    layers: list[nn.Module] = []
    for left in range(halvings - 1, -1, -1):
        wide = max(width >> left, 8) if left else width
        layers += [nn.Conv2d(channels, wide, 3, 2, 1), nn.GELU()]
        channels = wide
    return nn.Sequential(*layers, nn.Conv2d(width, width, 1))


class ViT(nn.Module):
    """Images ``(batch, channels, rows, columns)`` to features ``(batch, width)``, the mean over patches.

    Images whose sides are no multiple of ``patch`` are padded; of another size than ``size``, positions are
    interpolated.
    """

    def __init__(self, size: tuple[int, int], channels: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.grid = tuple(-(-side // patch) for side in size)
        self.patches = stem(channels, patch, width)
        self.positions = nn.Parameter(torch.empty(1, width, *self.grid))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        if not self.positions.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of what this module itself owns."""
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (-side % self.patch for side in images.shape[-2:])
        x = self.patches(F.pad(images, (0, columns, 0, rows)))
        positions = self.positions
        if x.shape[-2:] != positions.shape[-2:]:
            positions = F.interpolate(positions, x.shape[-2:], mode="bilinear", align_corners=False)
        x = (x + positions.to(x.dtype)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


class Neck(nn.Module):
    """Features to embeddings: a linear layer and batch normalization over the batches of all ranks, without an affine
    part, whose statistics are fp32 whatever the features are."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, embedding, bias=False)
        self.norm: nn.Module = SyncBatchNorm(embedding, affine=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(self.linear(features))


class FaceModel(nn.Module):
    """With labels it gives the mean loss of this rank's images, without them their embeddings.

    Args:
        config: of the backbone, the embedding and the head.
        classes: identities to tell apart.
    """

    def __init__(self, config: FaceConfig, classes: int) -> None:
        super().__init__()
        self.backbone, width = backbone_of(config)
        self.neck = Neck(width, config.embedding)
        self.head = MarginHead(
            config.embedding,
            classes,
            axis="data" if config.head == "sharded" else None,
            scale=config.scale,
            angle=config.angle,
            cosine=config.cosine,
            sample=config.sample,
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        embeddings = self.neck(self.backbone(images.to(self.neck.linear.weight.dtype)))
        return embeddings if labels is None else self.head(embeddings, labels)


def backbone_of(config: FaceConfig) -> tuple[nn.Module, int]:
    """The backbone, and how wide its features are.

    Raises:
        ConfigError: it is none of a package's, or the package is not installed.
    """
    found = package_of(config.backbone)
    if found is None:
        vit = ViT(config.image_size(), config.channels, config.patch, config.width, config.layers, config.heads)
        return vit, config.width
    package, name = found
    if package == "transformers":
        model, width = _of_transformers(name, config)
    else:
        model = timm_model(f"backbone timm:{name}", name, in_chans=config.channels, num_classes=0)
        width = int(model.num_features)
    _try(model, config)
    return model, width


def _try(model: nn.Module, config: FaceConfig) -> None:
    """A package's model takes images of the recipe's size; found out without values first, which few models cannot do.

    Raises:
        ConfigError: it does not.
    """
    images = torch.zeros(2, config.channels, *config.image_size())
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    without = {key: torch.empty_like(value, device="meta") for key, value in own.items()}
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            try:
                torch.func.functional_call(model, without, (images.to("meta"),))
            except Exception:
                model(images.to(next(iter(own.values())).device))
    except Exception as error:
        rows, columns = config.image_size()
        raise ConfigError(
            f"backbone {config.backbone} takes no images of {rows} x {columns} pixels"
            f"{f' in patches of {config.patch}' * config.backbone.startswith('transformers:')} "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('. ')}): give --size that it takes, "
            "often a multiple of 32, or another --backbone."
        ) from error
    finally:
        model.train(training)


class _Pooled(nn.Module):
    """A model of transformers, of whose hidden states the mean over patches is taken."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found: Any = self.model(pixel_values=images).last_hidden_state
        return found.mean(1) if found.dim() == 3 else found.flatten(2).mean(2)


def _of_transformers(name: str, config: FaceConfig) -> tuple[nn.Module, int]:
    what = f"backbone transformers:{name}"
    known = config_of_type(what, name, {})
    from transformers import AutoModel

    rows, columns = config.image_size()
    sizes = {
        "image_size": rows if rows == columns else (rows, columns),
        "num_channels": config.channels,
        "patch_size": config.patch,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width,
    }
    if hasattr(known, "depths"):  # stages of several widths, which are its own
        sizes = {key: sizes[key] for key in ("image_size", "num_channels", "patch_size")}
    if not hasattr(known, "num_channels"):
        raise ConfigError(f"{what} does not read images: name one that does, as vit or resnet.")
    if hasattr(known, "patch_size") and (rows % config.patch or columns % config.patch):
        whole = [f"{max(side // config.patch, 1) * config.patch}" for side in (rows, columns)]
        raise ConfigError(
            f"{what}: patches of {config.patch} x {config.patch} do not divide images of {rows} x {columns} pixels, "
            f"and what is left at the edges would not be seen: give --size {'x'.join(whole)}, or another --patch."
        )
    if "hidden_size" in sizes and hasattr(known, "num_attention_heads") and config.width % config.heads:
        raise ConfigError(f"{what}: width {config.width} does not divide into {config.heads} heads: choose a multiple.")
    for field, key in (
        ("patch", "patch_size"),
        ("width", "hidden_size"),
        ("layers", "num_hidden_layers"),
        ("heads", "num_attention_heads"),
    ):
        given = getattr(config, field) != FaceConfig.model_fields[field].default
        if given and not (key in sizes and hasattr(known, key)):
            raise ConfigError(without_effect(field, f"a model of transformers:{name} has none to choose"))
    of_model = config_of_type(what, name, {key: value for key, value in sizes.items() if hasattr(known, key)})
    try:
        model = AutoModel.from_config(of_model)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be made with these sizes: {error}; give another --width, --heads, --patch or --size."
        ) from None
    return _Pooled(model), int(getattr(of_model, "hidden_size", 0) or of_model.hidden_sizes[-1])
