"""The settings of `shardfold serve`. Imports no torch, so that the command line refuses bad values at once."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardfold.errors import ConfigError
from shardfold.plan.checks import parse_bytes
from shardfold.tools.answering.open_config import OpenConfig

__all__ = ["ServeConfig", "is_loopback", "read_keys"]

SHORTEST_KEY = 8


class ServeConfig(OpenConfig):
    """What is served, to whom, and how much of it at once. Field descriptions are the command line's help."""

    host: str = Field("127.0.0.1", description="Address to listen at; others than this machine's own need --key-file.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen at; 0: one that is free.")
    key_file: Path | None = Field(
        None, description="File with the keys that clients may use, one on each line; without it all may ask."
    )
    cache: str = Field("1GiB", description="Memory of keys and values of all texts, on each rank.")
    rows: int = Field(64, ge=1, le=4096, description="Texts that are generated at once, on each rank.")
    queue: int = Field(256, ge=0, le=10**6, description="Texts that wait behind them; who comes then is told 429.")
    name: str | None = Field(None, description="The model's name for clients; without it, its folder's.")
    template: str = Field("model", description="The chat template: model (the tokenizer's own), a file, or a name.")
    adapter: tuple[str, ...] = Field(
        (), description="An adapter of peft, as NAME=PATH: clients ask for it by model=NAME; may be repeated."
    )
    cors: tuple[str, ...] = Field(
        (), description="A site whose pages may ask from browsers, as https://example.org; may be repeated."
    )
    follow: bool = Field(False, description="Whenever the run has a newer checkpoint, its weights are taken.")

    @field_validator("cache")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if parse_bytes(value) is None:
            raise ValueError("it is a size, as 1GiB or 500MB")
        return value

    @field_validator("adapter", "cors", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_address(self) -> ServeConfig:
        if self.key_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines ask, so it needs keys: write one or more into a file, each on "
                "a line of its own, and give --key-file."
            )
        for each in self.adapter:
            name, _, path = each.partition("=")
            if not name or not path:
                raise ConfigError(f"--adapter {each}: it is a name and a folder, as --adapter polite=runs/polite.")
        for each in self.cors:
            if not each.startswith(("http://", "https://")) or each.count("/") != 2:
                raise ConfigError(f"--cors {each}: it is a scheme and a host, as https://example.org, with no path.")
        return self

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of peft's adapters by the names that clients ask for.

        Raises:
            ConfigError: a name is there twice, or is the model's own.
        """
        found: dict[str, Path] = {}
        for each in self.adapter:
            name, _, path = each.partition("=")
            if name in found or name == self.served_name:
                raise ConfigError(f"--adapter {each}: the name {name!r} is another model's: choose one of its own.")
            found[name] = Path(path).expanduser()
        return found

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.name if self.name is not None else self.model.expanduser().resolve().name or "model"

    @property
    def cache_bytes(self) -> int:
        size = parse_bytes(self.cache)
        assert size is not None
        return size


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: Path, option: str = "--key-file") -> list[bytes]:
    """Keys of a file, one on each line.

    Raises:
        ConfigError: it cannot be read, or there is no key in it, or one is short or has characters that no header has.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}.") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{option} {path} has no key in it: write one on a line of its own.")
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{option} {path}: key {number} is shorter than {SHORTEST_KEY} characters, or has others than "
                "letters, digits and signs of ASCII: make one with `openssl rand -hex 16`."
            )
    return [key.encode() for key in keys]
