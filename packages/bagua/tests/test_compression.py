"""Eight bits by minimum and maximum: what is lost, and what is not."""

import pytest
import torch
from packages.bagua.tests import formulas

from dstrat_bagua.compression import compress, decompress

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_further_off_than_half_a_level(dtype):
    values = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = compress(values)
    assert packed.dtype is torch.uint8
    assert packed.shape == (3, 1001 + (16 if dtype is torch.float64 else 8))
    back = decompress(packed, dtype)
    assert back.dtype is dtype
    level = (values.double().amax(1) - values.double().amin(1)) / 255
    rounding = torch.finfo(dtype).eps * 4
    # The largest level is that of the rounded maximum, which is half a level away from it at most.
    assert ((back.double() - values.double()).abs().amax(1) <= level * 1.01 + rounding).all()


def test_it_is_baguas_formula():
    values = torch.randn(500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(decompress(compress(values[None]), torch.float32)[0], formulas.lossy(values))


def test_zero_stays_zero():
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    values[:, ::3] = 0
    assert (decompress(compress(values), torch.float32)[:, ::3] == 0).all()
    assert (decompress(compress(torch.zeros(2, 5)), torch.float32) == 0).all()


@pytest.mark.parametrize("value", [1.0, -3.5, 1e-3, 1e4])
def test_equal_values_come_back_nearly(value):
    back = decompress(compress(torch.full((1, 9), value)), torch.float32)
    assert back == pytest.approx(torch.full((1, 9), value).numpy(), rel=1e-5, abs=2e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_chunk_only(value):
    values = torch.ones(2, 8)
    values[0, 3] = value
    first, second = decompress(compress(values), torch.float32)
    assert not first.isfinite().any()
    assert second.isfinite().all()
