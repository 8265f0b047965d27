"""Models that are opened with weights in host memory, on disk, and in fewer bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardfold.errors import ConfigError
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers")

PROMPTS = [[7, 8, 9], [30], [11, 12, 13, 14, 15]]


def _said(folder: Path, **how: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Greedy answers, and bytes of parameters by tier."""
    import shardfold as sf
    from shardfold.tools.answering.opened_model import OpenConfig, OpenedModel

    model = OpenedModel.open(OpenConfig.load({"model": folder, **how}))
    try:
        answers = {a.request: a.tokens for a in sf.generate(model.engine, PROMPTS, max_tokens=8, temperature=0)}
        rows = [row for row in model.engine.memory().rows if row.state == "params"]
    finally:
        model.close()
    return [answers[i] for i in range(len(PROMPTS))], {row.tier: row.held for row in rows}


def test_a_model_that_is_streamed_says_what_it_says_in_memory(tmp_path: Path) -> None:
    """From host memory or a file, whole or in fewer bits, whatever part stays: the tokens of the same weights in
    memory; bytes rest where they were asked to be."""
    folder = support.model_folder(tmp_path / "model", scale=4.0)
    for bits in (None, 8, 4):
        expected, held = _said(folder, bits=bits)
        total = sum(held.values())
        assert [*held] == ["device"]
        assert _said(folder, bits=bits, weights="host") == (expected, {"host": total})
        part = {"memory": str(total // 2), "weights_folder": str(tmp_path)}
        said, where = _said(folder, bits=bits, weights="disk", **part)
        assert said == expected and sum(where.values()) == total
        assert total / 2 <= where["disk"] < total
        assert _said(folder, bits=bits, weights="disk", memory=f"{2 * total}") == (expected, {"device": total})


def test_codes_take_the_bytes_of_their_bits(tmp_path: Path) -> None:
    """Against the sum of the formats: 8 bits and 4, with a scale in fp32 for each 64, of the matrices of blocks."""
    folder = support.model_folder(tmp_path / "model")
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # two layers: queries, output, keys, values, and the MLP
    whole = sum(_said(folder)[1].values())
    for bits, each in ((8, 1 + 4 / 64), (4, 0.5 + 4 / 64)):
        assert sum(_said(folder, bits=bits)[1].values()) == pytest.approx(whole - matrices * (4 - each), abs=4096)


def test_what_does_nothing_is_refused(tmp_path: Path) -> None:
    from shardfold.tools.answering.opened_model import OpenConfig

    for given, said in (
        ({"memory": "2GiB"}, "--memory has no effect here, as weights rest in memory: give --weights disk"),
        ({"memory": "2Gib", "weights": "disk"}, "'2Gib' names no bytes"),
        ({"weights": "host", "weights_folder": "/tmp"}, "--weights-folder has no effect here"),
        ({"weights": "dsik"}, "disk"),
        ({"bits": 3}, "bits is 3: weights rest in 2, 4 or 8"),
    ):
        with pytest.raises(ConfigError, match=said):
            OpenConfig.load({"model": tmp_path, **given})
    assert OpenConfig.load({"model": tmp_path, "bits": "4"}).bits == 4, "as a command line gives it"


PUBLISHED = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.mark.soak
@pytest.mark.parametrize("how", [{"weights": "disk"}, {"bits": 8}, {"weights": "disk", "bits": 8, "memory": "64KiB"}])
def test_a_known_model_tells_its_published_story(tmp_path: Path, how: dict[str, Any]) -> None:
    """stories260K, greedily: the text that its authors print, also from a file and in 8 bits."""
    import shardfold as sf
    from shardfold.tools.answering.opened_model import OpenConfig, OpenedModel

    if "SHARDFOLD_TEST_DATA" not in os.environ:
        pytest.skip("SHARDFOLD_TEST_DATA names no folder with stories260K in it")
    folder = Path(os.environ["SHARDFOLD_TEST_DATA"]) / "stories260K"
    model = OpenedModel.open(OpenConfig.load({"model": folder, **how}))
    (answer,) = sf.generate(model.engine, [[model.first]], max_tokens=200, temperature=0, stop=model.stops)
    said = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    model.close()
    assert said.strip().startswith(PUBLISHED)
