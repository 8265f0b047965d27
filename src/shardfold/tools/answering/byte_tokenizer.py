"""The tokenizer of a GPT whose tokens are bytes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["ByteTokenizer"]


class EncodedBytes(dict[str, list[int]]):
    """As transformers' tokenizers give it."""

    @property
    def input_ids(self) -> list[int]:
        return self["input_ids"]


class ByteTokenizer:
    """Byte k is token k; byte 0 ends a document.

    What is asked of it while texts are answered it does itself. For all else it is transformers', which is imported
    then: that takes longer than the rest of a command's start.
    """

    bos_token_id = None
    eos_token_id = 0

    def __init__(self) -> None:
        letters = _letters()
        self._end = letters[0]
        self.backend_tokenizer: Any = _backend(letters)
        self.backend_tokenizer.add_special_tokens([AddedToken(self._end, special=True, normalized=False)])
        # The letter that stands for byte 0 may stand in a text as well, where it is its own bytes.
        self.backend_tokenizer.encode_special_tokens = True

    def __len__(self) -> int:
        return 256

    def __call__(self, text: Any, **options: Any) -> Any:
        if isinstance(text, str) and options.keys() <= {"add_special_tokens"}:  # none is put around a text
            return EncodedBytes(input_ids=self.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return self.whole(text, **options)

    @cached_property
    def whole(self) -> Any:
        """The same of transformers."""
        from transformers import PreTrainedTokenizerFast

        made = _backend(_letters())
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=self._end, split_special_tokens=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)


def _backend(letters: list[str]) -> Any:
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    made: Any = backend
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _letters() -> list[str]:
    """Of each byte the letter that a tokenizer of bytes has for it: itself if it is printed, else one from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    moved = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
