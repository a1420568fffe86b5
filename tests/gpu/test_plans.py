"""Plans of the Hopper kernel: replayed after a refresh, made without host lengths, on two streams, in little memory."""

import math

import pytest
import torch
from scenes import answer, make

from fa4_core import Capacity, LayerSpec, PrefillBatch, merge_states, plan
from fa4_core.kernels.hopper import HopperKernel

STEPS = [
    ([90, 40], [5000, 600]),
    ([1, 300, 7], [4000, 300, 900]),
    ([0, 512], [64, 512]),
    ([33] * 9, [700] * 9),
    ([], []),
]
CAPACITY = Capacity(requests=9, query_tokens=512, keys=5120)


def call(ready, scene, out, lse=None):
    return ready.run(scene.q, scene.k, scene.v, softcap=scene.softcap, sinks=scene.sinks, out=out, lse=lse)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("page", [1, 16, 48])
def test_a_graph_is_replayed_after_refreshes(page, invariant):
    """Other lengths, another number of requests, another table; the answer's, and to the bit that of an eager run."""
    spec = LayerSpec(8, 2, 128)
    scenes = [make(spec, q, kv, page, order="mixed", seed=i) for i, (q, kv) in enumerate(STEPS)]
    pages = max(s.k.shape[0] for s in scenes)
    q = torch.zeros(512, 8, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.full((pages, page, 2, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    v, out = torch.full_like(k, math.nan), torch.empty_like(q)
    lse = torch.empty(8, 512, device="cuda")
    ready = plan(scenes[0].batch, spec, capacity=CAPACITY, kernel="hopper", invariant=invariant)

    def step():
        ready.run(q, k, v, out=out, lse=lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for scene in [*scenes, scenes[0]]:
        rows = scene.q.shape[0]
        q[:rows] = scene.q
        k[: len(scene.k)], v[: len(scene.v)] = scene.k, scene.v
        out.fill_(777.0)
        lse.fill_(777.0)
        ready.refresh(scene.batch)
        graph.replay()
        got, got_lse = out.clone(), lse.clone()
        assert (got[rows:] == 777.0).all()
        want, want_lse = answer(scene, 128**-0.5)
        if rows:
            assert (got[:rows].float() - want).abs().max() < 2e-2
            seen = want_lse > -math.inf
            assert (got_lse[:, :rows] - want_lse)[seen].abs().max() < 2e-2
        out.fill_(777.0)
        step()
        assert torch.equal(out, got)
        eager = plan(scene.batch, spec, kernel="hopper", invariant=invariant)
        if invariant and rows:
            assert torch.equal(call(eager, scene, torch.empty_like(scene.q)), got[:rows])


def test_nothing_beyond_the_capacity():
    spec = LayerSpec(8, 2, 128)
    ready = plan(make(spec, [5], [9], 16).batch, spec, capacity=Capacity(2, 100, 1000), kernel="hopper")
    for q, kv, what in (([101], [200], "query tokens"), ([1], [1001], "keys"), ([1] * 3, [1] * 3, "requests")):
        with pytest.raises(ValueError, match=f"{what}; allowed: at most the"):
            ready.refresh(make(spec, q, kv, 16).batch)
    bare = make(spec, [5], [9], 16).batch
    bare = PrefillBatch(bare.cu_seqlens_q, bare.kv_lens, bare.page_table, 16)
    with pytest.raises(ValueError, match="without host lengths for its query tokens"):
        ready.refresh(bare)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("known", ["nothing", "longest", "queries", "keys"])
def test_missing_host_lengths(known, page):
    """The same bits as with them, and no copy to the host on the way."""
    for spec in (LayerSpec(8, 2, 128, sinks=True), LayerSpec(8, 1, 64, causal=False, window=(100, 20))):
        scene = make(spec, [300, 0, 1, 77], [700, 40, 500, 60], page, order="mixed", reclaim=True)
        b = scene.batch
        want = call(plan(b, spec, kernel="hopper", invariant=True), scene, torch.empty_like(scene.q))
        lens = {"longest": {"max_q_len": 400, "max_kv_len": 800}, "queries": {"host_q_lens": b.host_q_lens},
                "keys": {"host_kv_lens": b.host_kv_lens}}.get(known, {})  # fmt: skip
        bare = PrefillBatch(b.cu_seqlens_q, b.kv_lens, b.page_table, page, **lens)
        spare = torch.cat([scene.q, torch.full_like(scene.q, math.nan)])
        out = torch.full_like(spare, 777.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ready = plan(bare, spec, kernel="hopper")
            few = ready.run(scene.q, scene.k, scene.v, sinks=scene.sinks)
            ready.run(spare, scene.k, scene.v, sinks=scene.sinks, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(few, want)
        assert torch.equal(out[: len(want)], want)
        assert (out[len(want) :] == 777.0).all()


def test_two_streams_take_turns_at_the_workspace():
    """Few blocks, so that the one plan's gather has multiprocessors to run on while the other plan reads scratch."""
    spec = LayerSpec(8, 1, 128)
    scenes = [make(spec, [200], [60000], 1, seed=seed) for seed in (1, 2)]
    plans = [plan(s.batch, spec, kernel="hopper", invariant=True) for s in scenes]
    wants = [call(p, s, torch.empty_like(s.q)) for p, s in zip(plans, scenes)]
    streams = [torch.cuda.Stream() for _ in scenes]
    for _ in range(3):
        outs = [torch.full_like(s.q, 777.0) for s in scenes]
        torch.cuda.synchronize()
        for ready, scene, stream, out in zip(plans, scenes, streams, outs):
            with torch.cuda.stream(stream):
                call(ready, scene, out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out, want in zip(outs, wants))


@pytest.mark.parametrize("kv", [60, 9000])
def test_sinks_that_are_no_numbers(kv):
    """-inf is no sink; NaN is NaN in its head alone; +inf leaves nothing that is a number. As in the reference."""
    spec = LayerSpec(4, 1, 128, sinks=True)
    scene = make(spec, [70, 3], [kv, 0], 16)
    scene.sinks = torch.tensor([0.5, -math.inf, math.nan, math.inf], device="cuda")
    got, got_lse = (torch.empty(73, 4, 128, dtype=torch.bfloat16, device="cuda"), torch.empty(4, 73, device="cuda"))
    want, want_lse = torch.empty_like(got), torch.empty_like(got_lse)
    call(plan(scene.batch, spec, kernel="hopper"), scene, got, got_lse)
    call(plan(scene.batch, spec, kernel="reference"), scene, want, want_lse)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)
    torch.testing.assert_close(got_lse, want_lse, atol=2e-3, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("page", [1, 16])
def test_splits_are_put_together_as_merge_states_does(page):
    spec = LayerSpec(8, 1, 128, causal=False, window=(None, None))
    whole = make(spec, [100], [9600], page)
    ready = plan(whole.batch, spec, kernel="hopper")
    assert ready._plan.num_splits > 1
    lse = torch.empty(8, 100, device="cuda")
    out = call(ready, whole, torch.empty_like(whole.q), lse)
    outs, lses = [], []
    for first, last in ((0, 3200), (3200, 9600), (9600, 9600)):  # the last part sees nothing
        table = whole.batch.page_table[:, first // page : max(last // page, first // page + 1)].contiguous()
        n = torch.tensor([last - first], dtype=torch.int32, device="cuda")
        part = PrefillBatch(whole.batch.cu_seqlens_q, n, table, page, host_q_lens=[100], host_kv_lens=[last - first])
        lses.append(torch.empty_like(lse))
        outs.append(torch.empty_like(out))
        call(plan(part, spec, kernel="hopper", invariant=True), whole, outs[-1], lses[-1])
    merged, merged_lse = merge_states(outs, lses)
    torch.testing.assert_close(out, merged, atol=8e-3, rtol=1.6e-2)
    torch.testing.assert_close(lse, merged_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("mib", [1, 3, 512])
def test_scattered_keys_beyond_the_workspace(monkeypatch, mib):
    """Some in scratch, the rest where they are; the same bits."""
    spec = LayerSpec(8, 2, 128)
    scene = make(spec, [300, 1, 128, 77], [300, 500, 900, 1101], 1, order="mixed")
    want = call(plan(scene.batch, spec, kernel="hopper", invariant=True), scene, torch.empty_like(scene.q))
    monkeypatch.setenv("FA4_WORKSPACE_MIB", str(mib))
    ready = plan(scene.batch, spec, kernel="hopper", invariant=True)
    assert torch.equal(call(ready, scene, torch.empty_like(scene.q)), want)
    exact, _ = answer(scene, 128**-0.5)
    assert (want.float() - exact).abs().max() < 2e-2


def test_what_is_reserved_is_enough():
    from fa4_core import Question, Target, settings

    question = Question(LayerSpec(8, 2, 128), 1, Target.of(torch.device("cuda")))
    assert HopperKernel().workspace_bytes(question) == settings.workspace_bytes()
