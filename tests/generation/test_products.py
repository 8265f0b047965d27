"""Products of few rows are those of PyTorch, whichever library multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfold.generation import _products
from shardfold.generation._products import FEW, product


@pytest.fixture(autouse=True)
def _as_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    of_library: Any = torch.ops.mkldnn
    monkeypatch.setattr(_products, "_onednn", getattr(of_library, "_linear_pointwise", None))
    monkeypatch.setattr(_products, "LARGE", 1000)


@pytest.mark.parametrize("count", [0, 1, 2, FEW - 1, FEW, 70])
def test_any_number_of_rows_gives_the_product(count: int) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(count, 24), nn.Parameter(torch.randn(50, 24))
    joined = torch.randn(60, 24).as_strided((50, 24), (24, 1), 5 * 24)
    with torch.no_grad():
        for each in (weight, joined, weight[:10]):
            found = product(rows, each)
            assert found.shape == (count, len(each))
            assert found.is_contiguous()
            torch.testing.assert_close(found, F.linear(rows, each))
        wide = product(torch.randn(count, 48)[:, ::2], weight)  # rows that do not lie together
    assert wide.shape == (count, 50)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_multiplied_by_pytorch(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(3, 24, dtype=dtype), torch.randn(50, 24, dtype=dtype)
    assert torch.equal(product(rows, weight), F.linear(rows, weight))


def test_under_autocast_the_product_is_narrow() -> None:
    rows, weight = torch.randn(20, 24), torch.randn(50, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(rows, weight).dtype == torch.bfloat16
