"""A small kernel from source to library, in a worker, with the DSL that is installed and without a GPU."""

import importlib.util
import shutil

import pytest

from fa4_core.kernels.hopper.objects.make import Made, make_all

MISSING = [m for m in ("cutlass", "tvm_ffi") if importlib.util.find_spec(m) is None]
MISSING += [c for c in ("gcc", "nm") if shutil.which(c) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_kernels_are_made_in_workers_and_one_that_fails_stops_no_other(tmp_path):
    kernels = {"fa4_hopper_combine_bf16_64": "combine_bf16_64", "fa4_hopper_bad": "combine_fp8_64"}
    results = list(make_all(kernels, tmp_path, jobs=1))
    [made] = [r for r in results if isinstance(r, Made)]
    assert made.name == "fa4_hopper_combine_bf16_64"
    assert made.problems == ()
    assert made.usage.threads == 256
    assert 0 < made.usage.registers <= 255
    assert made.bytes == (tmp_path / "fa4_hopper_combine_bf16_64.so").stat().st_size > 10_000
    [failed] = [r for r in results if not isinstance(r, Made)]
    assert failed == ("fa4_hopper_bad", "KeyError: 'fp8'")
    assert [path.name for path in tmp_path.iterdir()] == ["fa4_hopper_combine_bf16_64.so"]
