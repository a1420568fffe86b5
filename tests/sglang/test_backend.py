"""The backend over SGLang's real pools, layers and batches."""

from __future__ import annotations

import logging

import pytest
import torch
from world import DIM, KV_HEADS, Q_HEADS, Block, World, make_runner

from fa4_core import counters, kernels, workspace
from fa4_sglang import compat
from fa4_sglang.backend import FA4Backend

NEAR = 2e-6  # fp32 against float64; outputs are of order 1


PAGES = pytest.mark.parametrize("page_size", [1, 16, 64, 128])


@PAGES
def test_steps_that_a_server_makes(page_size):
    counters.reset()
    world = World(page_size)
    a, b = world.admit(), world.admit()
    assert world.step("EXTEND", (a, 48), (b, 33)) < NEAR, "cold, two at once"
    assert world.step("EXTEND", (a, 22)) < NEAR, "a chunk that follows another"
    c = world.admit(share=a, prefix=64)
    assert c.kv_len == (64 if page_size <= 64 else 0)
    assert world.step("EXTEND", (c, 5)) < NEAR, "after a prefix that another request wrote"
    assert world.step("DECODE", (a, 1), (b, 1), (c, 1)) < NEAR
    d = world.admit()
    assert world.step("MIXED", (d, 19), (a, 1), (b, 1)) < NEAR, "a prompt, and decode rows after it"
    assert world.step("MIXED", (d, 1), (c, 40), (b, 1)) < NEAR
    counted = counters.stats()
    assert counted["sglang.steps"] == 6
    assert counted["sglang.scheduled_tokens"] == world.tokens
    assert counted["prefill.query_tokens.reference"] == 2 * world.tokens, "both layers, every token"


@PAGES
def test_sliding_windows_in_a_pool_of_their_own(page_size):
    counters.reset()
    world = World(
        page_size, [Block(0, sliding_window_size=20), Block(1), Block(2, sliding_window_size=20)], hybrid=True
    )
    assert world.backend._window_layers == {0, 2}
    a, b = world.admit(), world.admit()
    assert world.step("EXTEND", (a, 148), (b, 33)) < NEAR, "cold, two at once"
    c = world.admit(share=a, prefix=128)
    assert world.step("EXTEND", (c, 5), (b, 60)) < NEAR, "a prefix that another wrote, and a chunk"
    room = world.allocator.swa_available_size()
    world.leave(b, window=20)
    assert world.allocator.swa_available_size() == room + 73 // page_size * page_size
    assert world.step("MIXED", (a, 1), (b, 1), (world.admit(), 90), padding=3) < NEAR, "rows that left are reused"
    assert world.step("DECODE", (a, 1), (b, 1), (c, 1)) < NEAR
    assert world.step("IDLE") == 0
    assert counters.stats()["prefill.query_tokens.reference"] == 3 * world.tokens, "all layers, every token"


def test_the_second_pools_new_keys_and_pages_are_its_own():
    """What the test above rests on: no slot and no page of a request is the same in both pools."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World(16, [Block(0), Block(1, sliding_window_size=20)], hybrid=True)
    batch = world.forward_batch(ForwardMode.EXTEND, [(world.admit(), 48)])
    world.backend.init_forward_metadata(batch)
    step = world.backend.forward_metadata
    assert not (step.window_slots == batch.out_cache_loc).any()
    assert not (step.window_batch.page_table == step.batch.page_table).any()


def test_locations_that_sglang_narrows_after_a_step_was_planned():
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World(1, [Block(0, sliding_window_size=20)], hybrid=True)
    batch = world.forward_batch(ForwardMode.EXTEND, [(world.admit(), 6)], padding=4)
    world.backend.init_forward_metadata(batch)
    batch.out_cache_loc = batch.out_cache_loc[:6]
    found = unwrap_write_loc(compat.write_loc(batch, world.blocks[0].attn, world.backend.forward_metadata.window_slots))
    assert torch.equal(found[0], batch.out_cache_loc)
    assert torch.equal(found[1], world.pool.full_to_swa_index_mapping[batch.out_cache_loc])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "kinds",
    [
        {"sliding_window_size": 7},
        {"sliding_window_size": 1},
        {"logit_cap": 3.0},
        {"sinks": torch.linspace(-1, 4, Q_HEADS)},
        {"sinks": torch.linspace(-1, 4, Q_HEADS).bfloat16()},
        {"scaling": 0.5, "sliding_window_size": 20, "logit_cap": 2.0, "sinks": torch.ones(Q_HEADS)},
    ],
    ids=["window", "window of two", "softcap", "sinks", "bf16 sinks", "all"],
)
def test_kinds_of_layers(page_size, kinds):
    world = World(page_size, [Block(0), Block(1, **kinds)])
    a, b = world.admit(), world.admit()
    assert world.step("EXTEND", (a, 40), (b, 3)) < NEAR
    assert world.step("MIXED", (b, 30), (a, 1)) < NEAR
    assert world.step("DECODE", (a, 1), (b, 1)) < NEAR


@pytest.mark.parametrize("window", [None, 0, -1])
def test_a_window_of_no_length_is_none(window):
    world = World(1, [Block(0, sliding_window_size=window)])
    assert world.step("EXTEND", (world.admit(), 40)) < NEAR


def test_no_tokens():
    world = World(16)
    assert world.step("IDLE") == 0
    assert world.step("EXTEND") == 0
    assert world.step("DECODE") == 0
    a = world.admit()
    assert world.step("EXTEND", (a, 20), (world.admit(), 0)) < NEAR, "a request that has nothing new"


def test_padding_rows_come_back_as_zeros():
    world = World(16)
    a = world.admit()
    assert world.step("EXTEND", (a, 20), padding=12) < NEAR
    assert world.step("DECODE", (a, 1), padding=3) < NEAR


def test_lengths_that_the_host_does_not_know():
    world = World(16)
    a = world.admit()
    assert world.step("EXTEND", (a, 20), seq_lens_cpu=None) < NEAR
    assert world.step("DECODE", (a, 1), seq_lens_cpu=None) < NEAR


def test_lengths_that_the_host_guesses_too_long():
    world = World(16)
    a = world.admit()
    assert world.step("EXTEND", (a, 20), seq_lens_cpu=torch.tensor([60])) < NEAR


@pytest.fixture
def call():
    """A call of one layer of a one-layer server, four new tokens, and what came of it."""
    world = World(1, [Block(0)])
    request = world.admit()
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = world.forward_batch(ForwardMode.EXTEND, [(request, 4)])
    world.backend.init_forward_metadata(batch)
    q, k, v = torch.randn(4, Q_HEADS * DIM), *(torch.randn(4, KV_HEADS, DIM) for _ in range(2))

    def forward(k=k, v=v, **options):
        return world.backend.forward(q, k, v, world.blocks[0].attn, batch, **options)

    forward.pool, forward.slots, forward.k, forward.v = world.runner.token_to_kv_pool, request.slots[:4], k, v
    return forward


@pytest.mark.parametrize("name", ["q_rope", "k_rope", "score_mod", "rel_bias", "k_descale", "something_new"])
def test_a_keyword_that_is_not_served_is_refused(call, name):
    with pytest.raises(ValueError, match=f"{name} given to layer 0; allowed: sinks"):
        call(**{name: torch.ones(1)})
    assert call.pool.get_key_buffer(0)[call.slots].isnan().all(), "nothing was written"


def test_keywords_that_say_nothing_are_let_pass(call):
    assert call(q_rope=None, return_lse=False).isfinite().all()
    with pytest.raises(ValueError, match="return_lse"):
        call(return_lse=True)


def test_keys_that_are_there_already(call):
    written = call()
    assert torch.equal(call(k=None, v=None), written), "a layer that reads what another has written"
    assert torch.equal(call(k=torch.ones_like(call.k), save_kv_cache=False), written), "a model that writes itself"
    assert torch.equal(call.pool.get_key_buffer(0)[call.slots], call.k)


def test_sinks_that_the_walk_did_not_find(call):
    plain, heavy = call(), call(sinks=torch.full((Q_HEADS,), 20.0))
    assert heavy.abs().max() < 1e-3 < plain.abs().max(), "a heavy sink takes all the weight"


def test_pages_are_views_of_the_pool():
    from fa4_sglang import translate

    world = World(16)
    pool = world.runner.token_to_kv_pool
    k, v = translate.pages(pool, world.blocks[1].attn, 16)
    assert k.shape == v.shape == (pool.k_buffer[1].shape[0] // 16, 16, KV_HEADS, DIM)
    assert (k.data_ptr(), v.data_ptr()) == (pool.k_buffer[1].data_ptr(), pool.v_buffer[1].data_ptr())


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "SPLIT_PREFILL"])
def test_modes_that_are_not_served_are_refused(mode):
    world = World(1)
    with pytest.raises(ValueError, match=f"forward_mode was {mode}; allowed: EXTEND, MIXED, DECODE, IDLE"):
        world.step(mode, (world.admit(), 3))


def test_several_items_in_a_request_are_refused():
    world = World(1)
    with pytest.raises(ValueError, match="multi_item_delimiter_indices"):
        world.step("EXTEND", (world.admit(), 3), multi_item_delimiter_indices=[torch.tensor([1])])


def test_decoding_in_cuda_graphs_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="--decode-attention-backend"):
        World(1).backend.init_cuda_graph_state(8, 8)


def test_the_deterministic_option_selects_the_invariant_setting(monkeypatch):
    from fa4_sglang import backend

    asked = []
    monkeypatch.setattr(backend, "prefill", lambda *_, **options: asked.append(options["invariant"]))
    for options in ({}, {"enable_deterministic_inference": True}):
        world = World(1, [Block(0)], **options)
        world.step("EXTEND", (world.admit(), 3))
    assert asked == [False, True]


def test_a_server_says_once_what_serves_it(caplog, tmp_path):
    runner = make_runner([Block(0), Block(1, sliding_window_size=7), Block(2, sinks=torch.ones(Q_HEADS))], 16)
    with caplog.at_level(logging.INFO):
        FA4Backend(runner), FA4Backend(runner)  # as with two-batch overlap
    [line] = [r.getMessage() for r in caplog.records if r.name == "fa4"]
    assert f"in sglang {compat.version()}, " in line
    assert "reference for [4/2 heads, d 32, float32, causal | " in line
    assert "window 7" in line
    assert "sinks" in line
    assert "page size 16" in line
    assert [p.engine for p in counters.read_published(tmp_path / "counters")] == ["sglang"]


def test_a_server_holds_its_workspace_from_its_start(monkeypatch):
    monkeypatch.setattr(workspace, "_blocks", {})
    monkeypatch.setattr(kernels.ReferenceKernel, "workspace_bytes", lambda self, question: 300 * question.page_size)
    FA4Backend(make_runner([Block(0)], 16))
    assert [block.numel() for block in workspace._blocks.values()] == [4800]
