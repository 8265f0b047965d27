"""What is installed only on request, `pip install 'shardfold[cli]'`, and the sentence for what is missing.

Training from Python needs none of it. Imports nothing, so that it can be asked where everything is missing.
"""

from __future__ import annotations

__all__ = ["EXTRAS", "sentence"]

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "pydantic": "cli",
    "matplotlib": "report",
    "pillow": "face",
    "pyarrow": "face",
    "torchvision": "vision",
    "timm": "vision",
    "transformers": "tune",
    "tokenizers": "tune",
    "peft": "tune",
    "jinja2": "tune",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "starlette": "board",
    "uvicorn": "board",
}
"""Packages that come with an extra, and its name."""

MODULES = {"PIL": "pillow", "onnx_ir": "onnxscript"}
"""Packages by the module that is imported, where its name is another."""


def sentence(what: str, error: ModuleNotFoundError) -> str | None:
    """Return how to get what `error` did not find, if an extra brings it.

    Args:
        what: what cannot be done without it, the subject of the sentence.
    """
    module = (error.name or "").partition(".")[0]
    package = MODULES.get(module, module)
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    way = f"pip install 'shardfold[{extra}]' (in a checkout: '.[{extra}]')"
    return f"{what} needs {package}, which is not installed: {way}"
