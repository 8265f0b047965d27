"""Formats of blocks: what their codes are, how far what is decoded may be off, and what becomes of strange blocks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardfold.errors import LayoutError
from shardfold.plan.formats import FORMATS, Format, format_named
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.outer import Outer
from shardfold.plan.presets import PRESETS, zero3

NAMES = ["int8", "int4", "int8+zero", "int4+zero", "fp8", "int8/64", "int4/1024+zero"]
INF, NAN = float("inf"), float("nan")


def _form(text: str) -> Format:
    return FORMATS[format_named(text, "gather")]


def _values(seed: int, rows: int, length: int) -> torch.Tensor:
    """Of any magnitude, a different one in each stretch of 100 elements."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-30, 30, 61)[torch.randint(0, 61, (rows, -(-length // 100)), generator=draw)]
    return torch.randn(rows, length, generator=draw) * scales.repeat_interleave(100, 1)[:, :length]


def _coded(form: Format, values: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload, and what it is decoded to."""
    payload = torch.full((len(values), form.nbytes(values.shape[1])), 0xAA, dtype=torch.uint8)
    form.encode(values, payload, state)
    decoded = torch.full_like(values, 7.0)
    form.decode(payload, decoded)
    return payload, decoded


# The reference: integers of a block, in float64, rounded to fp32 where the format says that a number is one.
def _reference(block: np.ndarray, bits: int, zero: bool) -> tuple[np.ndarray, list[np.float32]]:
    def fp32(x: np.ndarray) -> np.ndarray:
        return np.asarray(x, dtype=np.float32).astype(np.float64)

    x = block.astype(np.float64)
    if zero:
        low, high, most = min(x.min(), 0.0), max(x.max(), 0.0), 2**bits - 1
        scale = max(fp32(fp32(high - low) / most), 2.0**-126)
        point = np.round(fp32(low * -fp32(1 / scale)))
        codes = np.clip(np.round(fp32(x * fp32(1 / scale))) + point, 0, most)
        return codes.astype(np.int64), [np.float32(scale), np.float32(point)]
    most = 2 ** (bits - 1) - 1
    scale = max(fp32(np.abs(x).max() / most), 2.0**-126)
    return np.round(fp32(x * fp32(1 / scale))).astype(np.int64), [np.float32(scale)]


@given(
    st.sampled_from([n for n in NAMES if "fp8" not in n]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6)
)
def test_codes_and_scales_are_those_of_the_reference_to_the_bit(text: str, rows: int, blocks: int, seed: int) -> None:
    form = _form(text)
    bits, zero = int(text[3]), "zero" in text
    values = _values(seed, rows, blocks * form.block)
    payload = _coded(form, values)[0].view(rows * blocks, -1).numpy()
    for found, block in zip(payload, values.view(rows * blocks, -1).numpy(), strict=True):
        codes, numbers = _reference(block, bits, zero)
        if bits == 4:
            low, high = codes.reshape(2, -1) & 15
            codes = low | high << 4
        assert np.array_equal(
            found[: -4 * len(numbers)], codes.astype(np.uint8 if zero or bits == 4 else np.int8).view(np.uint8)
        )
        assert found[-4 * len(numbers) :].view(np.float32).tolist() == numbers


@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_no_element_is_off_by_more_than_half_a_step(text: str, rows: int, blocks: int, seed: int) -> None:
    """A step is the scale; of fp8, a sixteenth of the element, or 2^-10 of the scale. Besides, each of the three
    operations in fp32 rounds once."""
    form = _form(text)
    values = _values(seed, rows, blocks * form.block)
    error = (_coded(form, values)[1].double() - values.double()).abs().unflatten(1, (-1, form.block))
    wide = values.double().unflatten(1, (-1, form.block))
    if "fp8" in text:
        scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=2**-126)
        half = torch.maximum(wide.abs() / 16, scale * 2**-10)
    elif "zero" in text:
        half = (
            (wide.amax(-1, keepdim=True).clamp(min=0) - wide.amin(-1, keepdim=True).clamp(max=0))
            / (2 ** int(text[3]) - 1)
            / 2
        )
    else:
        half = wide.abs().amax(-1, keepdim=True) / (2 ** (int(text[3]) - 1) - 1) / 2
    half = half.clamp(min=2**-127)
    assert bool((error <= half * (1 + 255 * 2**-22)).all())


@pytest.mark.parametrize("text", ["int8", "int4", "int4+zero", "fp8"])
def test_smaller_blocks_err_less(text: str) -> None:
    """Of normal numbers: the greatest of a block grows with its length, and the error with it; but fp8's, which is that
    of each element."""
    values = torch.randn(1, 2**16, generator=torch.Generator().manual_seed(0))
    base, _, options = text.partition("+")
    rms: list[float] = []
    for length in (16, 64, 256, 1024, 4096):
        decoded = _coded(_form(f"{base}/{length}" + (f"+{options}" if options else "")), values)[1]
        rms.append(float((decoded - values).square().mean().sqrt()))
    if text == "fp8":
        assert max(rms) < 1.2 * min(rms)
    else:
        assert all(a * 1.08 < b for a, b in pairwise(rms)), rms


@pytest.mark.parametrize("text", [*NAMES, "int8+stochastic", "int4+zero+stochastic"])
def test_strange_blocks_are_what_the_format_says(text: str) -> None:
    """Zeros are zeros, constants stay but for rounding, and what is not finite is found in every element, and in no
    other block."""
    form = _form(text)
    n = form.block
    rows = [torch.zeros(n), torch.full((n,), 3.7e-5), torch.full((n,), -2e30), torch.full((n,), 1e-42)]
    rows += [torch.linspace(0, 1, n) * sign for sign in (1, -1)] + [torch.zeros(n) for _ in range(3)]
    for block, bad in zip(rows[-3:], (INF, -INF, NAN), strict=True):
        block[3] = bad
    values = torch.cat([*rows, torch.ones(n)]).view(1, -1)
    decoded = _coded(form, values)[1].view(-1, n)
    assert not decoded[0].any()
    for i in (1, 2):
        torch.testing.assert_close(decoded[i], rows[i], rtol=2e-7 if "fp8" not in text else 2**-4, atol=0)
    assert bool((decoded[3].abs() <= 2**-126).all())
    assert not decoded[4][0] and not decoded[5][0]
    assert bool(decoded[6:9].isnan().all()) and bool(decoded[9].isfinite().all()) and bool(decoded[:6].isfinite().all())


def test_what_is_rounded_stochastically_has_no_bias_and_is_the_same_again() -> None:
    form = _form("int4+stochastic")
    values = torch.full((1, 2**18), 0.3)
    values[0, ::256] = 7  # the scale is 1, so that 0.3 is 0 or 1
    payload, decoded = _coded(form, values)
    assert torch.equal(payload, _coded(form, values)[0])
    assert set(decoded[0].unique().tolist()) == {0.0, 1.0, 7.0}
    rest = decoded.view(-1, 256)[:, 1:]
    assert abs(float(rest.mean()) - 0.3) < 5 * (0.3 * 0.7 / rest.numel()) ** 0.5


class _Divided(TorchDispatchMode):
    """Numbers by which tensors are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div and not isinstance(args[1], torch.Tensor):
            self.by.append(args[1])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("text", [*NAMES, "int8+stochastic", "int8+error"])
def test_codes_do_not_depend_on_how_a_device_divides_by_a_number(text: str) -> None:
    """CUDA's kernel multiplies by the reciprocal of a number, which is exact for powers of two only."""
    with _Divided() as seen:
        _coded(_form(text), _values(0, 2, 2 * _form(text).block), torch.zeros(2, 2 * _form(text).block))
    assert all(math.frexp(number)[0] == 0.5 for number in seen.by), seen.by


@pytest.mark.parametrize("text", ["int8+error", "int4/64+error", "int4+zero+error", "fp8+error", "sign/32+error"])
def test_what_is_lost_is_kept_and_added_to_what_comes_next(text: str) -> None:
    """But of a block that is not finite: nothing of that is kept, or it would never be finite again."""
    form = _form(text)
    state = torch.zeros(2, form.block * 3)
    applied, true = torch.zeros_like(state, dtype=torch.float64), torch.zeros_like(state, dtype=torch.float64)
    for i in range(50):
        values = torch.randn(state.shape, generator=torch.Generator().manual_seed(i))
        applied += _coded(form, values, state)[1]
        true += values
    assert (applied - true).abs().max() > 1e-3
    torch.testing.assert_close(applied + state, true, rtol=0, atol=50 * 2**-22)
    before = state.clone()
    values = torch.ones(state.shape)
    values[1, 5] = INF
    assert bool(_coded(form, values, state)[1][1, : form.block].isnan().all())
    assert torch.equal(state[1, : form.block], before[1, : form.block]) and not torch.equal(state[0], before[0])


def test_signs_and_their_scales_are_those_of_the_reference() -> None:
    """Bit k of byte i is that of element 8 i + k, zeros are positive and count for no scale, and of a block that is not
    finite the scale is NaN."""
    form, values = _form("sign/64"), _values(3, 2, 512)
    values[0, :5], values[0, 5], values[0, 64:128], values[1, 7] = 0.0, -0.0, 0.0, -INF
    payload, decoded = _coded(form, values)
    found, blocks = payload.view(16, -1).numpy(), values.view(16, -1).double().numpy()
    assert np.array_equal(found[:, :8], np.packbits(blocks >= 0, axis=1, bitorder="little"))
    scales = np.ascontiguousarray(found[:, 8:]).view(np.float32)[:, 0]
    wanted = np.abs(blocks).sum(1) / np.maximum((blocks != 0).sum(1), 1)
    assert np.isnan(scales[8]) and np.isinf(wanted[8])
    finite = np.arange(16) != 8
    np.testing.assert_allclose(scales[finite], wanted[finite], rtol=64 * 2**-24)
    signed = np.where(blocks >= 0, scales[:, None], -scales[:, None])
    np.testing.assert_array_equal(decoded.view(16, -1).numpy(), signed)


@pytest.mark.parametrize("text", ["int4", "sign"])
def test_rows_may_lie_apart_and_in_any_floating_dtype(text: str) -> None:
    form = _form(text)
    values = torch.randn(4, 3, 512, generator=torch.Generator().manual_seed(0))
    payload, decoded = _coded(form, values[:, 1].contiguous())
    apart = torch.empty(4, 2, payload.shape[1], dtype=torch.uint8)
    form.encode(values[:, 1], apart[:, 1])
    assert torch.equal(apart[:, 1], payload)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        out = torch.empty(4, 512, dtype=dtype)
        form.decode(apart[:, 1], out)
        assert torch.equal(out, decoded.to(dtype))
        form.encode(out, apart[:, 0])
        assert torch.equal(apart[:, 0], _coded(form, out.float())[0])


def test_what_a_table_prints_and_what_a_sentence_lists_may_be_typed() -> None:
    """Formats with options as tables print them, and each that is listed where a name is none."""
    for reduce in ("int8/64+zero+error", "int4x2+error", "sign+error", "fp8/512x2"):
        wire = Layout(reduce=reduce).reduce  # pyright: ignore
        assert ":" not in str(wire) and Layout(reduce=str(wire)).reduce == wire  # pyright: ignore
    everywhere = Precision(compute="fp64", grads="fp64", reduce="fp64", master="fp64", moments="fp64")
    narrow, mesh = Precision(), {"inter": 2, "intra": 2}

    def outer(name: str) -> Layout:
        return PRESETS["zero3"].with_outer(Outer(every=2, format=name))

    for make, precision in (
        (lambda name: PRESETS["zero3"].replace(gather=name), everywhere),
        (lambda name: PRESETS["zero3"].replace(reduce=name), everywhere),
        (outer, narrow),
    ):
        with pytest.raises(LayoutError, match="Known: ") as raised:
            make("qqqq")
        known = str(raised.value).partition("Known: ")[2].rstrip(".").split(", ")
        assert "int4" in known and "int32" not in known
        for name in known:
            make(name).bind(precision, mesh)


def test_a_name_has_one_form_and_a_wrong_one_a_sentence() -> None:
    names = {
        "int8": "int8/256",
        "int4/64": "int4/64",
        "int8:error,zero": "int8/256:zero,error",
        "fp8+error": "fp8/256:error",
    }
    for text, name in names.items():
        assert format_named(text, "reduce") == name == FORMATS[name].name and name in FORMATS
        assert Layout(reduce=text).reduce.format == name  # pyright: ignore
    assert "int8:error/64" not in FORMATS and "int8/256:error,zero" not in FORMATS
    for text, words in (
        ("int3", "reduce travels as 'int3', which is not a format. Did you mean 'int8'?"),
        ("int8/100", "the format 'int8/100' has blocks of 100 elements: they have a multiple of 16, up to 65536."),
        ("int8+eror", "the format 'int8+eror' has the option 'eror', which is unknown. Did you mean 'error'?"),
        ("fp8+zero", "the format 'fp8+zero' has the option 'zero', which is unknown. Did you mean 'error'?"),
    ):
        with pytest.raises(LayoutError) as raised:
            Layout(reduce=text)  # pyright: ignore
        assert str(raised.value) == words
    with pytest.raises(LayoutError, match="leave 'error' out"):
        zero3.replace(gather="int8+error")


def test_payloads_take_what_the_formats_say() -> None:
    """Bytes per element: bits, and scales."""
    for text, each in (
        ("int8", 1 + 4 / 256),
        ("int4/64", 0.5 + 4 / 64),
        ("int4+zero", 0.5 + 8 / 256),
        ("fp8/32", 1 + 4 / 32),
    ):
        form = _form(text)
        assert form.nbytes(12 * form.block) == 12 * form.block * each == 12 * form.nbytes(form.block)
