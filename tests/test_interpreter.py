"""The corrected interpreter: conversions, fma and dot as on a GPU, and when it may be switched on."""

import math
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_store import e4m3_code

triton = pytest.importorskip("triton", reason="needs Triton, which has no wheel for this platform")
tl = triton.language

from dflash_paged.interpreter import interpret_kernels

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # the interpreter's fp16
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {E4M3: torch.uint8, E5M2: torch.uint8, BF16: torch.int16, F16: torch.int16, F32: torch.int32}


@triton.jit
def _convert_kernel(x_ptr, y_ptr, N: tl.constexpr):
    # One program owns everything.
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    # One program owns everything.
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    # One program owns everything: c += a @ b, all [N, N].
    cells = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    c = tl.dot(tl.load(a_ptr + cells), tl.load(b_ptr + cells), tl.load(c_ptr + cells))
    tl.store(c_ptr + cells, c)


def converted(x, dtype):
    """`x` as the interpreter converts it, padded to a power of two for `tl.arange`."""
    size = 1 << max(len(x) - 1, 0).bit_length()
    padded = torch.zeros(size, dtype=x.dtype)
    padded.view(BITS[x.dtype])[: len(x)] = x.view(BITS[x.dtype])
    out = torch.zeros(size, dtype=dtype)
    _convert_kernel[(1,)](padded, out, N=size)
    return out[: len(x)]


def every(dtype):
    """Every bit pattern of a type of at most 16 bits."""
    bits = torch.arange(2**8 if dtype in (E4M3, E5M2) else 2**16)
    return bits.to(BITS[dtype]).view(dtype)


def assert_same_codes(got, want):
    """Equal bits; a NaN may be any NaN."""
    bits = BITS[got.dtype]
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(bits)[~nan], want.view(bits)[~nan])


def downcast(x, dtype):
    """torch's conversion; to fp8 it saturates, infinities too."""
    if dtype in (E4M3, E5M2):
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)


def hard_fp32(dtype):
    """fp32 values around each place where rounding to `dtype` changes its mind, and fp32's extremes."""
    exact = every(dtype).float()
    exact = exact[exact.isfinite()].double().unique()
    middle = ((exact[1:] + exact[:-1]) / 2).float()  # exact: fp32 has bits to spare
    up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
    near = torch.cat([middle, middle.nextafter(up), middle.nextafter(down)])
    limit = torch.finfo(dtype).max
    beyond = torch.tensor([limit * f for f in (1.001, 1.03, 1.0625, 1.2, 2.0, 1e3)])
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).int().view(F32)  # NaN too
    special = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-149, 2.0**-126, torch.finfo(F32).max])
    values = torch.cat([exact.float(), near, beyond, special, patterns])
    return torch.cat([values, -values])


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, E5M2], ids=str)
def test_fp32_becomes_the_nearest_even_code(dtype):
    """Ties, neighbours of ties, overflow, NaN, infinities, subnormals of both types, and any bits."""
    x = hard_fp32(dtype)
    assert x.isnan().any() and x.isinf().any() and (x.abs() > torch.finfo(dtype).max).any()
    got = converted(x, dtype)
    assert_same_codes(got, downcast(x, dtype))
    if dtype == E4M3:  # and by the format's definition, without torch
        real = ~x.isnan()
        np.testing.assert_array_equal(got.view(torch.uint8)[real].numpy(), e4m3_code(x[real].numpy()))


@pytest.mark.parametrize("source,dtype", [
    (BF16, F32), (F16, F32), (E4M3, F32), (E5M2, F32), (E4M3, BF16), (E5M2, BF16), (E4M3, F16), (E5M2, F16),
    (BF16, E4M3), (BF16, E5M2), (F16, E4M3), (F16, E5M2),
], ids=lambda d: str(d).removeprefix("torch."))
def test_every_pattern_of_a_small_type_converts_as_torchs(source, dtype):
    x = every(source)
    assert_same_codes(converted(x, dtype), downcast(x, dtype))


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2], ids=str)
def test_a_small_value_comes_back_from_fp32_unchanged(dtype):
    """Up and down again: the same bits; only e5m2's infinities saturate."""
    x = every(dtype)
    back = converted(converted(x, F32), dtype)
    assert_same_codes(back, downcast(x, dtype) if dtype == E5M2 else x)


def test_fp8_saturates_and_keeps_nan():
    x = torch.tensor([448.0, 463.9, 464.0, 1e9, float("inf"), float("-inf"), -1e9])
    assert converted(x, E4M3).float().tolist() == [448.0] * 5 + [-448.0] * 2
    assert converted(x * 128, E5M2).float().tolist()[3:] == [57344.0] * 2 + [-57344.0] * 2
    for dtype in (E4M3, E5M2):
        assert converted(torch.tensor([float("nan"), -float("nan")]), dtype).float().isnan().all()


def fma(x, y, z):
    out = torch.zeros_like(z)
    _fma_kernel[(1,)](x, y, z, out, N=len(x))
    return out


def test_fma_rounds_once():
    """The remainder of a quotient is exact, where two roundings would leave nothing of it."""
    generator = torch.Generator().manual_seed(3)
    x, s = torch.rand(4096, generator=generator), torch.rand(4096, generator=generator) + 0.5
    q = x / s
    got = fma(-q, s, x)
    exact = [Fraction(float(a)) - Fraction(float(b)) * Fraction(float(c)) for a, b, c in zip(x, q, s)]
    assert [Fraction(float(g)) for g in got] == exact  # a remainder fits in fp32
    assert (got != 0).float().mean() > 0.9
    inf = float("inf")
    cases = [[1e30, 1e30, -inf], [2.0**100, 2.0**28, -(2.0**127)], [inf, 0.0, 1.0], [0.0, 1.0, 2.0]]
    x, y, z = torch.tensor(cases).T
    got = fma(x.contiguous(), y.contiguous(), z.contiguous()).tolist()
    assert got[:2] == [-inf, 2.0**127] and math.isnan(got[2])  # no product overflows on its way


def test_fma_rounds_once_beside_a_tie_that_fp64_cannot_see():
    """1 + 2^-23 + 2^-24 - 2^-70 is below the midpoint of two fp32 values; fp64 makes it the midpoint."""
    e = 2.0**-23
    x, y, z = (torch.tensor([v]) for v in (2.0**-12 * (1 + e), 2.0**-12 * (1 - e), 1 + e))
    exact = Fraction(x.item()) * Fraction(y.item()) + Fraction(z.item())
    low, high = Fraction(1 + e), Fraction(1 + 2 * e)
    assert exact - low < high - exact
    assert fma(x, y, z).item() == 1 + e


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_dot_multiplies_values_and_not_their_bits(dtype):
    """Small integers and quarters: every product and sum is exact in fp32, so the result is too."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: (torch.randint(-32, 33, (16, 16), generator=generator) / 4).to(dtype)
    a, b, c = draw(), draw(), draw().float()
    want = a.double() @ b.double() + c.double()
    _dot_kernel[(1,)](a, b, c, N=16)
    assert torch.equal(c.double(), want)


def test_dot_of_fp8_multiplies_values():
    a = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).to(E4M3)
    c = torch.zeros(16, 16)
    _dot_kernel[(1,)](a, a, c, N=16)
    torch.testing.assert_close(c, a.float() @ a.float(), rtol=1e-6, atol=1e-5)  # 16 sums in another order


def test_switching_on_twice_changes_nothing():
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    before = interpreter._convert_float, builder.create_fma, builder.create_dot
    interpret_kernels()
    interpret_kernels()
    assert before == (interpreter._convert_float, builder.create_fma, builder.create_dot)
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("code,want", [
    ("import triton\ninterpret_kernels()", "RuntimeError: triton: expected it not to be imported yet"),
    ("interpret_kernels()\nimport triton\ninterpret_kernels()\n"
     "assert type(triton.jit(interpret_kernels)).__name__ == 'InterpretedFunction'", ""),
], ids=["compiling", "first"])
def test_it_must_come_before_triton(code, want):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "from dflash_paged.interpreter import interpret_kernels\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    assert (done.returncode, last.startswith(want)) == (1 if want else 0, True), done.stderr
