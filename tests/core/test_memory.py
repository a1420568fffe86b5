"""The reference never holds more scores than a tile by a tile."""

import subprocess
import sys

LONG = """
import resource, torch
from fa4_core import LayerSpec, PrefillBatch, prefill
torch.set_num_threads(2)
n = {n}
q, k, v, out = (torch.randn(n, 1, 64) for _ in range(4))
lens = torch.tensor([n], dtype=torch.int32)
batch = PrefillBatch(torch.tensor([0, n], dtype=torch.int32), lens, torch.arange(n // 16, dtype=torch.int32)[None], 16)
spec = LayerSpec(1, 1, 64, dtype=torch.float32)
prefill(q[:16], k.view(-1, 16, 1, 64), v.view(-1, 16, 1, 64), PrefillBatch(torch.tensor([0, 16], dtype=torch.int32),
        lens, torch.arange(n // 16, dtype=torch.int32)[None], 16), spec)  # libraries warm up outside the measure
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prefill(q, k.view(-1, 16, 1, 64), v.view(-1, 16, 1, 64), batch, spec, out=out)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_32768_by_32768_stays_under_300_mb():
    result = subprocess.run([sys.executable, "-c", LONG.format(n=32768)], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 300
