"""Codes of levels in a table, and scales that are codes: bitsandbytes' to the bit, and what is lost of values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfold.errors import LayoutError
from shardfold.plan.formats import FORMATS, Format, format_named
from shardfold.plan.layout import Layout, Wire
from tests.support.nf4_reference import CASES, Reference, bitsandbytes_codes, kept, values_of

RESTING = ["nf4/64", "int8/64", "int4/64", "int2/32"]
BYTES = {"nf4/64": 0.5625, "int8/64": 1.0625, "int4/64": 0.5625, "int2/32": 0.375}


def _form(text: str) -> Format:
    return FORMATS[format_named(text, "gather")]


def _coded(form: Format, values: torch.Tensor) -> torch.Tensor:
    length = -(-values.numel() // form.block) * form.block
    payload = torch.full((form.nbytes(length),), 0xAA, dtype=torch.uint8)
    form.encode_tensor(values.view(-1), payload)
    return payload


def _back(form: Format, payload: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full((payload.numel() // form.nbytes(form.block) * form.block,), 7.0, dtype=dtype)
    form.decode(payload.view(1, -1), values.view(1, -1))
    return values[:numel]


def _check(values: torch.Tensor, reference: Reference) -> None:
    blocks, numel = values.numel() // 64, values.numel()
    plain = _coded(_form("nf4"), values).view(-1, 36)
    assert torch.equal(plain[:, :32].reshape(-1), reference.codes)
    assert torch.equal(plain[:, 32:].contiguous().view(torch.float32).view(-1), reference.scales)
    double = _coded(_form("nf4+double"), values).view(-1, 8192 + 256 + 8)
    assert torch.equal(double[:, :8192].reshape(-1)[: numel // 2], reference.codes)
    assert torch.equal(double[:, 8192:8448].reshape(-1)[:blocks], reference.scale_codes)
    numbers = double[:, 8448:].contiguous().view(torch.float32)
    assert torch.equal(numbers[:, 0], reference.most) and bool((numbers[:, 1] == reference.mean).all())


@pytest.mark.parametrize("case", CASES)
def test_nf4_codes_scales_and_codes_of_scales_are_those_of_bitsandbytes(case: str) -> None:
    """As they were written down: also in the middle of two levels, of blocks of zeros, and of a last group that is not
    full."""
    _check(values_of(case), kept(case))


@given(st.integers(0, 10**6), st.integers(1, 600), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]))
def test_they_are_where_it_is_installed(seed: int, blocks: int, size: float) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: what it gave is kept in a file")
    values = torch.randn(blocks, 64, generator=torch.Generator().manual_seed(seed)) * size
    _check(values, bitsandbytes_codes(values))


@pytest.mark.parametrize("name", RESTING)
def test_bytes_of_an_element_are_as_the_papers_count(name: str) -> None:
    """4, 8 or 2 bits and 32 of a scale for each block; with double quantization 8 bits of it and, for 256 blocks, two
    numbers."""
    form, double = _form(name), _form(f"{name}+double")
    block = int(name.partition("/")[2])
    assert form.nbytes(2**20) == BYTES[name] * 2**20
    saved = 2**20 / block * 3 - 2**20 / (block * 256) * 8
    assert double.nbytes(2**20) == form.nbytes(2**20) - saved
    assert double.block == 256 * form.block


@given(st.sampled_from(RESTING), st.booleans(), st.integers(1, 20_000), st.integers(0, 999))
def test_what_is_decoded_is_near_and_a_part_of_a_tensor_is_decoded_alone(
    name: str, double: bool, numel: int, seed: int
) -> None:
    form = _form(name + "+double" * double)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    payload = _coded(form, values)
    decoded = _back(form, payload, numel)
    half = {"nf4/64": 0.1520, "int8/64": 0.5 / 127, "int4/64": 0.5 / 7, "int2/32": 1 / 3}[name]  # of the widest gap
    most = values.abs().max()
    assert (decoded - values).abs().max() <= most * (half + 1e-5 + 0.02 * double)
    size = form.nbytes(form.block)
    for i in {0, payload.numel() // size - 1}:
        part = _back(form, payload[i * size : (i + 1) * size].clone(), form.block)
        assert torch.equal(part[: numel - i * form.block], decoded[i * form.block : (i + 1) * form.block])
    assert torch.equal(_back(form, payload, numel, torch.bfloat16), decoded.bfloat16())


@pytest.mark.parametrize("name", [*RESTING, *(f"{name}+double" for name in RESTING)])
def test_what_is_not_finite_is_found_and_zeros_stay(name: str) -> None:
    form = _form(name)
    values = torch.zeros(form.block + 5)
    decoded = _back(form, _coded(form, values), values.numel())
    assert torch.equal(decoded, values)
    values[3] = float("inf")
    assert bool(_back(form, _coded(form, values), values.numel())[:16].isnan().all())


def test_names_say_what_they_cannot_have() -> None:
    assert format_named("nf4", "gather") == "nf4/64" and format_named("int2", "gather") == "int2/32"
    assert format_named("nf4+double", "gather") == "nf4/64:double"
    with pytest.raises(LayoutError, match="an option beside 'double'"):
        FORMATS[format_named("int8/64+double+zero", "gather")]
    with pytest.raises(LayoutError, match=r"unknown\. Did you mean 'double'"):
        format_named("nf4/64+dubble", "gather")
    for name in ("nf4+double", "int2"):
        for wire in ("gather", "reduce"):
            with pytest.raises(LayoutError, match="rest so"):
                Layout().replace(**{wire: Wire(format=name)})
