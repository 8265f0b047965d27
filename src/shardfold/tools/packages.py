"""Models of other packages by a name, as `timm:resnet18` or `transformers:vit`, wherever one is taken."""

from __future__ import annotations

from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.extras import sentence

__all__ = ["PACKAGES", "config_of_type", "package_of", "timm_model"]

PACKAGES = ("transformers", "timm")


def package_of(text: str) -> tuple[str, str] | None:
    """The package and the name that it knows; None: the text is no such name."""
    package, _, name = text.partition(":")
    return (package, name) if package in PACKAGES and name else None


def timm_model(what: str, name: str, **settings: Any) -> Any:
    """The model of timm that has the name, with values of its own: nothing is downloaded.

    Args:
        what: for which option it is, the subject of the sentence.
        name: that timm knows.
        settings: arguments of ``timm.create_model``.

    Raises:
        ConfigError: timm is not installed, does not run here, knows no such name, or refuses the settings.
    """
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if (words := sentence(what, error)) is None:
            raise
        raise ConfigError(f"{words}.") from None
    except Exception as error:  # of another build than PyTorch is, for one
        raise ConfigError(f"{what} needs timm, which cannot be imported: {_first(error)}.") from error
    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise ConfigError(f"{what}: timm has no model {name!r}.{near}")
    try:
        return timm.create_model(name, pretrained=False, **settings)
    except Exception as error:
        raise ConfigError(f"{what}: timm makes no model of it: {_first(error)}.") from error


def config_of_type(what: str, name: str, settings: dict[str, Any]) -> Any:
    """The configuration of a type of model that transformers knows, with these settings; others are its own.

    Args:
        what: for which option it is, the subject of the sentence.
        name: a ``model_type``.
        settings: of the configuration.

    Raises:
        ConfigError: transformers is not installed, knows no such type, or refuses the settings.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ModuleNotFoundError:
        raise ConfigError(f"{what} needs transformers: pip install transformers.") from None
    if name not in CONFIG_MAPPING:
        near = did_you_mean(name, list(CONFIG_MAPPING.keys()))
        raise ConfigError(f"{what}: transformers has no type of model {name!r}.{near}")
    try:
        return AutoConfig.for_model(name, **settings)
    except Exception as error:
        raise ConfigError(f"{what} is refused by transformers: {_first(error)}.") from error


def _first(error: Exception) -> str:
    """The first lines of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(". :")
