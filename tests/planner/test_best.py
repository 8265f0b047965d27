"""What `sf.plan.best` takes, and whether it answers for the step that it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def best(**given: Any) -> Any:
    return sf.plan.best(model(), torch.randn(2, 64), **{"gpus": "2xL4", "layouts": ("zero1",), **given})


@pytest.mark.parametrize("samples", [64, 100])
def test_no_step_is_faster_for_more_samples_than_were_asked_for(samples: int) -> None:
    """Micro-batches that do not divide a step round it up; what they do too much counts for nothing."""
    found = best(samples=samples)
    assert found.batch == samples == 2 * found.candidate.micro_batch * found.candidate.accumulate
    assert found.samples == pytest.approx(samples / found.seconds.step)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 0}, "samples= is 0: it is a number of samples, 1 or more"),
        ({"samples": 2.5}, "samples= is 2.5"),
        ({"gpus": 2}, "gpus= is 2: it is text, as '8xA100-40G'"),
        ({"memory": 2**34}, "memory= is 17179869184: it is text, as '40GiB'"),
        ({"memory": "24"}, "memory='24' is as many bytes: write it as '24GiB'"),
        ({"host": "much"}, "host='much' is not a number of bytes above 0"),
        ({"axes": {"tensor": 2}}, "axes= is .*: it is a list of dicts"),
        ({"layouts": "zero1"}, "layouts= is 'zero1': it is a list of names"),
        ({"layouts": ()}, "layouts= is .*: it is a list of names"),
        ({"layouts": ("zero9",)}, "layouts= has 'zero9', which is none of"),
        ({"modes": ("keeps",)}, "modes= has 'keeps', .* Did you mean 'keep'"),
        ({"precision": "fp7"}, "^(?!nothing fits).*fp7"),
        ({"axes": ({"tensor": 3},)}, "^(?!nothing fits).*3"),
    ],
)
def test_what_names_nothing_is_refused(given: dict[str, Any], words: str) -> None:
    """In a sentence that names the argument, before anything is planned."""
    with pytest.raises(ConfigError, match=words):
        best(**given)


@pytest.mark.parametrize("accumulate", [0, "2", 1.5])
def test_a_largest_batch_is_of_whole_micro_batches(accumulate: Any) -> None:
    with pytest.raises(ConfigError, match=r"accumulate= is .*: it is a number of micro-batches, 1 or more"):
        sf.plan.largest_batch(model(), torch.randn(2, 64), gpus="1xL4", accumulate=accumulate)
