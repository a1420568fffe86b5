"""Our Hopper kernel against the definition in fp32: poisoned outputs, NaN in every row that holds no key."""

import itertools
import random

import pytest
import torch
from scenes import LAYOUTS, check, make, run

from fa4_core import LayerSpec

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
PAGES = [1, 2, 5, 8, 16, 48, 128]


def spec_of(hq=8, hk=2, d=128, d_v=None, dtype=torch.bfloat16, **more):
    return LayerSpec(hq, hk, d, d_v, dtype, **more)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("d", "d_v"), DIMS)
def test_page_sizes(d, d_v, page):
    check(make(spec_of(d=d, d_v=d_v), [300, 1, 128, 77], [300, 500, 900, 1101], page))


@pytest.mark.parametrize("order", ["runs", "mixed"])
@pytest.mark.parametrize(("d", "d_v"), DIMS)
def test_consecutive_slots(d, d_v, order):
    check(make(spec_of(d=d, d_v=d_v), [300, 1, 128, 77], [300, 500, 900, 1101], 1, order=order))


@pytest.mark.parametrize(("layout", "page"), list(itertools.product(LAYOUTS, [1, 8, 16])))
def test_strides(layout, page):
    check(make(spec_of(), [200, 33], [500, 333], page, layout=layout))


@pytest.mark.parametrize(("hq", "hk"), [(1, 1), (4, 4), (6, 2), (7, 1), (28, 4), (32, 8), (40, 8), (24, 1)])
def test_gqa_ratios(hq, hk):
    check(make(spec_of(hq, hk), [200, 33, 1, 16], [500, 333, 70, 16], 16))


@pytest.mark.parametrize("window", [(None, None), (None, 0), (0, 0), (127, 0), (100, 50), (None, 13), (1000, None)])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("d", [64, 128])
def test_windows(window, page, d):
    spec = spec_of(d=d, causal=False, window=window)
    check(make(spec, [300, 1, 513], [800, 500, 513], page, reclaim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [1, 16])
def test_softcap_and_sinks(dtype, page):
    check(make(spec_of(dtype=dtype, softcap=True, sinks=True), [130, 1], [300, 70], page, softcap=30.0, gain=2.0))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("d", "d_v", "window"), [(*dims, None) for dims in DIMS] + [(64, 64, 100)])
def test_softcap_at_every_head_dim(d, d_v, window, page):
    """Two of them have tiles of their own, since a tanh leaves fewer registers; the short window has its own anyway."""
    spec = spec_of(d=d, d_v=d_v, softcap=True, window=(window, None))
    check(make(spec, [130, 1, 400], [900, 70, 400], page, softcap=20.0, gain=2.0))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_rows(page, sinks):
    spec = spec_of(sinks=sinks)
    check(make(spec, [0, 40, 5, 0, 300, 9], [0, 0, 3, 50, 100, 9], page))


@pytest.mark.parametrize("scale", [1.0, 0.3, -0.2, 0.0])
def test_scales(scale):
    check(make(spec_of(), [100], [140], 16, gain=0.5), scale=scale)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed):
    rng = random.Random(seed)
    d, d_v = rng.choice(DIMS)
    hk = rng.choice([1, 2, 4])
    left, right = rng.choice([None, None, 5, 64, 300]), rng.choice([0, 0, 0, None, 20])
    hq, dtype = hk * rng.choice([1, 2, 3, 4, 8]), rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    spec = spec_of(hq, hk, d, d_v, dtype,
                   causal=False, window=(left, right), sinks=rng.random() < 0.3)  # fmt: skip
    q_lens = [rng.choice([0, 1, 3, 17, 64, 128, 200, 700, 1500]) for _ in range(rng.randint(1, 9))]
    kv_lens = [max(0, n + rng.choice([0, 0, 1, 5, 100, 1000, 3000, -2])) for n in q_lens]
    check(make(spec, q_lens, kv_lens, rng.choice([1, 1, 3, 16, 32, 64, 128]), layout=rng.choice(LAYOUTS),
               order=rng.choice(["random", "runs", "mixed"]), reclaim=True, seed=seed))  # fmt: skip


@pytest.mark.parametrize(("d", "d_v"), DIMS)
def test_same_bits_in_any_company(d, d_v):
    spec = spec_of(d=d, d_v=d_v)
    scale = d**-0.5
    alone = make(spec, [333], [1200], 16, seed=5)
    want, want_lse = run(alone, scale)
    for page, order in [(1, "random"), (1, "runs"), (128, "random"), (48, "random")]:
        companies = [([333], [1200]), ([50, 333, 9], [900, 1200, 9]), ([1, 4, 333], [1, 2000, 1200])]
        for place, (q_lens, kv_lens) in enumerate(companies):
            scene = make(spec, q_lens, kv_lens, page, order=order, seed=9)
            row = sum(q_lens[:place])
            scene.q[row : row + 333] = alone.q
            scene.dense[place] = alone.dense[0]
            pos = torch.arange(1200, device="cuda")
            pages = scene.batch.page_table[place][pos // page].long()
            scene.k[pages, pos % page], scene.v[pages, pos % page] = alone.dense[0]
            out, lse = run(scene, scale)
            assert torch.equal(out[row : row + 333], want)
            assert torch.equal(lse[:, row : row + 333], want_lse)


@pytest.mark.parametrize(("d", "d_v"), DIMS)
def test_same_bits_in_any_chunking(d, d_v):
    spec, n = spec_of(d=d, d_v=d_v), 777
    whole = make(spec, [n], [n], 16, seed=3)
    want, _ = run(whole, d**-0.5)
    for cut in (1, 100, 512, 776):
        for a, b in ((0, cut), (cut, n)):
            part = make(spec, [b - a], [b], 16, seed=4)
            part.q[:] = whole.q[a:b]
            pos = torch.arange(b, device="cuda")
            pages = part.batch.page_table[0][pos // 16].long()
            part.k[pages, pos % 16] = whole.dense[0][0][:b]
            part.v[pages, pos % 16] = whole.dense[0][1][:b]
            out, _ = run(part, d**-0.5)
            assert torch.equal(out, want[a:b])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("d", "d_v"), DIMS)
@pytest.mark.parametrize("page", [1, 16])
def test_split_keys(d, d_v, page, sinks):
    from fa4_core.kernels.hopper import HopperKernel

    scene = make(spec_of(8, 1, d, d_v, sinks=sinks), [100, 0, 7], [9000, 40, 5000], page, order="mixed")
    assert HopperKernel().plan(scene.batch, scene.spec, invariant=False).num_splits > 1
    assert HopperKernel().plan(scene.batch, scene.spec, invariant=True).num_splits == 1
    check(scene)


def test_split_with_lengths_shorter_than_the_hosts_bounds():
    from fa4_core import PrefillBatch

    scene = make(spec_of(8, 1), [40, 20], [3000, 5], 16)
    b = scene.batch
    scene.batch = PrefillBatch(b.cu_seqlens_q, b.kv_lens, b.page_table, 16, host_q_lens=[100, 100],
                               host_kv_lens=[9000, 9000])  # fmt: skip
    check(scene)


def test_lengths_shorter_than_the_hosts_bounds():
    from fa4_core import PrefillBatch

    scene = make(spec_of(), [40, 200], [300, 260], 16)
    b = scene.batch
    scene.batch = PrefillBatch(b.cu_seqlens_q, b.kv_lens, b.page_table, 16, host_q_lens=[300, 300],
                               host_kv_lens=[700, 700])  # fmt: skip
    check(scene)


@pytest.mark.parametrize("page", [1, 16])
def test_graph_replay_with_other_lengths(page):
    from scenes import answer

    from fa4_core.kernels.hopper import HopperKernel

    scene = make(spec_of(8, 1), [90, 40], [5000, 600], page, order="mixed")
    scale = 128**-0.5
    plan = HopperKernel().plan(scene.batch, scene.spec, invariant=False)
    assert plan.num_splits > 1
    out = torch.full_like(scene.q, 777.0)

    def step():
        plan.run(scene.q, scene.k, scene.v, scale=scale, softcap=0.0, sinks=None, out=out, lse=None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for kv_lens in ([5000, 600], [4321, 41], [100, 600]):
        scene.batch.kv_lens.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        scene.kv_lens, dense = kv_lens, scene.dense
        scene.dense = [(k[:n], v[:n]) for (k, v), n in zip(dense, kv_lens)]
        out.fill_(777.0)
        graph.replay()
        torch.cuda.synchronize()
        want, _ = answer(scene, scale)
        assert (out.float() - want).abs().max() < 2e-2
        scene.dense = dense


def test_pools_past_two_billion_elements():
    spec = spec_of(8, 8, 128)
    scene = make(spec, [100], [200], 16)
    pages = 2**31 // (16 * 8 * 128) + 40
    k = torch.empty(pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.empty_like(k)
    table = scene.batch.page_table
    used = table[0, :13].long()
    for big, small in ((k, scene.k), (v, scene.v)):
        big[used + pages - 40] = small[used]
    scene.k, scene.v = k, v
    scene.batch = scene.batch.with_pages(table + (pages - 40))
    check(scene)
