"""The forward kernel: one producer warpgroup, two or three consumer warpgroups, a work list.

A work item is one query tile of one kv head: `granules` granules of eight query rows, each of one q head, in the
order (eight queries, q head). A granule is one TMA box whatever the GQA ratio, and its head and its first query are
the same for a whole warp. Keys are walked from the last visible tile to the first; tiles start at multiples of n
counted from key 0, so a row's bits do not depend on how its request is cut.

Producer warps: 0 loads K, 1 loads V, 2 takes work items and loads Q. A consumer overlaps a tile's scores with the
previous tile's output product; its softmax runs under the other consumers' products.
"""

from __future__ import annotations

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from . import mask, ptx, softmax
from .config import BOX, COLUMNS, GRANULE, Config
from .pages import ROW_BYTES, PageLoader
from .ranges import key_tiles, query_span

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

# What a work slot in shared memory holds, an Int32 each.
SLOT = ("valid", "request", "row0", "q_len", "kv_len", "granule0", "kv_head", "n_min", "n_max", "clear_lo", "clear_hi",
        "lo", "partial")  # fmt: skip
SLOT_INTS = 16
Q_HEADS = (8, 4, 2, 1)  # q heads of one box of queries: all divide a tile's granules
GROUP = 1  # named barriers GROUP + g: the warps of consumer g among themselves


class Forward:
    """One variant.

    Args:
        config: Which.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.tile = config, config.tile
        self.dtype = DTYPES[config.dtype]
        self.loaders = (PageLoader(config, config.d, exact=False), PageLoader(config, config.d_v, exact=True))
        self.q_bytes = 2 * self.tile.m * config.width

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (total_q, q_heads, d)
        mK: cute.Tensor,  # (pages, page_size, kv_heads, d), or (1, slots, kv_heads, d) where flat
        mV: cute.Tensor,  # (pages, page_size, kv_heads, d_v), likewise
        mO: cute.Tensor,  # (total_q, q_heads, d_v)
        mLSE: cute.Tensor,  # (q_heads, total_q) fp32; unused without want_lse
        mSinks: cute.Tensor,  # (q_heads,) fp32; unused without has_sinks
        mCuQ: cute.Tensor,  # (B + 1,)
        mKvLens: cute.Tensor,  # (B,)
        mTable: cute.Tensor,  # (B, P)
        mWork: cute.Tensor,  # (items, 8): see plan.ITEM_INTS
        mControl: cute.Tensor,  # (4,): the next item's counter, zero between launches; items, boxes, split tiles
        mFirstSlots: cute.Tensor,  # (boxes,); this and the next two unused without slots
        mFirstBox: cute.Tensor,  # (B,)
        mScratchK: cute.Tensor,  # (1, gathered * BOX, kv_heads, d)
        mScratchV: cute.Tensor,  # (1, gathered * BOX, kv_heads, d_v)
        mPartO: cute.Tensor,  # (partials * m, d_v) fp32; this and the next unused where no item is split
        mPartLSE: cute.Tensor,  # (partials * m,) fp32, base 2
        scale: Float32,  # of scores in base 2; with softcap, cap * log2(e)
        inner: Float32,  # with softcap, 2 log2(e) scale / cap
        left: Int32,
        right: Int32,
        page_size: Int32,
        flat: Int32,
        gathered: Int32,
        want_lse: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Make the tensor maps and launch."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        t, d, d_v = self.tile, self.config.width, self.config.width_v
        sQ_layout = cute.tile_to_shape(atom, (t.m, d, t.q_stages), (0, 1, 2))
        sK_layout = cute.tile_to_shape(atom, (t.n, d, t.k_stages), (0, 1, 2))
        sV_layout = cute.tile_to_shape(atom, (t.n, d_v, t.v_stages), (0, 1, 2))
        rs = warpgroup.OperandSource.RMEM
        K, MN = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        qk = make_trivial_tiled_mma(self.dtype, self.dtype, K, K, Float32, (t.groups, 1, 1), (64, t.n))
        pv = make_trivial_tiled_mma(self.dtype, self.dtype, K, MN, Float32, (t.groups, 1, 1), (64, d_v), rs)

        def tma(tensor, mode, rows, heads=1):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=mode))
            dims = 2 + (heads > 1)
            shape, stride = (rows, COLUMNS, heads)[:dims], (COLUMNS, 1, rows * COLUMNS)[:dims]
            box = cute.make_composed_layout(atom.inner, 0, cute.make_layout(shape, stride=stride))
            return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, shape)[0]

        maps = (tma(mK, [1, 3, 2, 0], BOX), tma(mV, [1, 3, 2, 0], BOX))
        # The host writes each map at every launch, so there are no more than the variant uses.
        if const_expr(self.config.load == "slots"):
            others = (tma(mK, [1, 3, 2, 0], 1), tma(mScratchK, [1, 3, 2, 0], BOX), tma(mScratchV, [1, 3, 2, 0], BOX))
        else:
            others = (maps[0], *maps)  # unused
        self.kernel(
            *[tma(mQ, [0, 2, 1], GRANULE, heads) for heads in Q_HEADS],
            *maps,
            tma(mV, [1, 3, 2, 0], 1),
            *others,
            mO, mLSE, mSinks, mCuQ, mKvLens, mTable, mWork, mControl, mFirstSlots, mFirstBox, mPartO, mPartLSE,
            scale, inner, left, right, page_size, flat, gathered, want_lse, has_sinks,
            cute.size(mQ, mode=[1]) // cute.size(mK, mode=[2]),
            sQ_layout, sK_layout, sV_layout, qk, pv,
        ).launch(grid=(blocks, 1, 1), block=(t.threads, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        tma_q8: cute.CopyAtom,
        tma_q4: cute.CopyAtom,
        tma_q2: cute.CopyAtom,
        tma_q1: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_v_row: cute.CopyAtom,
        tma_k_row: cute.CopyAtom,  # this and the next two unused without slots
        tma_k_scratch: cute.CopyAtom,
        tma_v_scratch: cute.CopyAtom,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor,
        mCuQ: cute.Tensor,
        mKvLens: cute.Tensor,
        mTable: cute.Tensor,
        mWork: cute.Tensor,
        mControl: cute.Tensor,
        mFirstSlots: cute.Tensor,
        mFirstBox: cute.Tensor,
        mPartO: cute.Tensor,
        mPartLSE: cute.Tensor,
        scale: Float32,
        inner: Float32,
        left: Int32,
        right: Int32,
        page_size: Int32,
        flat: Int32,
        gathered: Int32,
        want_lse: Int32,
        has_sinks: Int32,
        ratio: Int32,
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
    ) -> None:
        """Set the barriers up and give each warp its role."""
        t = self.tile
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        alloc = SmemAllocator()
        sQ = alloc.allocate_tensor(self.dtype, sQ_layout.outer, byte_alignment=1024, swizzle=sQ_layout.inner)
        sK = alloc.allocate_tensor(self.dtype, sK_layout.outer, byte_alignment=1024, swizzle=sK_layout.inner)
        sV = alloc.allocate_tensor(self.dtype, sV_layout.outer, byte_alignment=1024, swizzle=sV_layout.inner)
        slot_layout = cute.make_layout((t.q_stages, SLOT_INTS), stride=(SLOT_INTS, 1))
        slots = cute.make_tensor(alloc.allocate_array(Int32, t.q_stages * SLOT_INTS), slot_layout)
        bars = SimpleNamespace(
            item=alloc.allocate_array(Int64, t.q_stages),  # the slot is written
            q=alloc.allocate_array(Int64, t.q_stages),  # the query tile has landed
            free=alloc.allocate_array(Int64, t.q_stages),  # slot and query tile are done with
            ending=alloc.allocate_array(Int64, 1),  # the last K tile of an item is asked for
            k=alloc.allocate_array(Int64, t.k_stages),
            v=alloc.allocate_array(Int64, t.v_stages),
            k_free=alloc.allocate_array(Int64, t.k_stages),
            v_free=alloc.allocate_array(Int64, t.v_stages),
        )
        if warp == 0 and tid == 0:
            cute.arch.mbarrier_init(bars.ending, 1)
            for i in range_constexpr(t.q_stages):
                cute.arch.mbarrier_init(bars.item + i, 1)
                cute.arch.mbarrier_init(bars.q + i, 1)
                cute.arch.mbarrier_init(bars.free + i, 4 * t.groups + 2)
            for i in range_constexpr(t.k_stages):
                cute.arch.mbarrier_init(bars.k + i, 1)
                cute.arch.mbarrier_init(bars.k_free + i, 4 * t.groups)
            for i in range_constexpr(t.v_stages):
                cute.arch.mbarrier_init(bars.v + i, 1)
                cute.arch.mbarrier_init(bars.v_free + i, 4 * t.groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        many, few = t.registers
        if warp < 4:
            cute.arch.warpgroup_reg_dealloc(few)
            src = SimpleNamespace(table=mTable, page_size=page_size, flat=flat, gathered=gathered,
                                  first_slots=mFirstSlots, first_box=mFirstBox)  # fmt: skip
            if warp == 0:
                maps = (tma_k, tma_k_row, tma_k_scratch)
                self.produce(src, False, maps, sK, slots, bars, bars.k, bars.k_free)
            if warp == 1:
                maps = (tma_v, tma_v_row, tma_v_scratch)
                self.produce(src, True, maps, sV, slots, bars, bars.v, bars.v_free)
            if warp == 2:
                maps = (tma_q8, tma_q4, tma_q2, tma_q1)
                self.schedule(maps, mCuQ, mKvLens, mWork, mControl, left, right, ratio, sQ, slots, bars)
        else:
            cute.arch.warpgroup_reg_alloc(many)
            self.consume(qk, pv, sQ, sK, sV, slots, bars, mO, mLSE, mSinks, mPartO, mPartLSE, want_lse, has_sinks,
                         scale, inner, left, right, ratio)  # fmt: skip

    @cute.jit
    def schedule(self, maps, mCuQ, mKvLens, mWork, mControl, left, right, ratio, sQ, slots, bars):
        """Warp 2: take items off the list, work out their key ranges, load their queries."""
        t = self.tile
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        items = mControl[1]
        # One box for as many heads as the ratio allows: the copy engine takes some 40 ns a box, however small.
        heads, descriptor = Int32(1), ptx.descriptor_address(maps[3])
        for i in range_constexpr(3):
            if heads == 1 and ratio % Q_HEADS[i] == 0:
                heads, descriptor = Int32(Q_HEADS[i]), ptx.descriptor_address(maps[i])
        base = sQ.iterator.toint()
        index, turn, going = block, Int32(0), Int32(1)
        while going == 1:
            stage, phase = turn % t.q_stages, (turn // t.q_stages) & 1
            going = Int32(1) if index < items else Int32(0)
            if index < items:
                request, kv_head, tile = mWork[index, 0], mWork[index, 1], mWork[index, 2]
                row0 = mCuQ[request]
                q_len = mCuQ[request + 1] - row0
                kv_len = mKvLens[request]
                granule0 = tile * t.granules
                first, last = query_span(tile, ratio, q_len, t.granules, cutlass.min)
                n_min, n_max, clear_lo, clear_hi = key_tiles(
                    first, last, q_len, kv_len, left, right, t.n, cutlass.min, cutlass.max
                )
                if last < first:  # the host's bound was longer than the request
                    n_max = n_min
                start, pieces, partial, stop = mWork[index, 3], mWork[index, 4], mWork[index, 5], mWork[index, 6]
                if pieces > 1:
                    whole = cutlass.max(n_max - n_min, 0)
                    n_min, n_max = n_min + whole * start // pieces, n_min + whole * stop // pieces
                # Only now, with the item looked up, wait for a place to put it.
                cute.arch.mbarrier_wait(bars.free + stage, phase ^ 1)
                if lane == 0:
                    fields = (1, request, row0, q_len, kv_len, granule0, kv_head, n_min, n_max, clear_lo, clear_hi,
                              cutlass.max(0, kv_len - q_len - left), partial)  # fmt: skip
                    for i in range_constexpr(len(SLOT)):
                        slots[stage, i] = Int32(fields[i])
                    cute.arch.mbarrier_arrive(bars.item + stage)
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.q + stage, self.q_bytes)
                cute.arch.sync_warp()
                granule = granule0 + lane * heads
                if lane * heads < t.granules:
                    head = kv_head * ratio + granule % ratio
                    row = row0 + GRANULE * (granule // ratio)
                    at = base + stage * self.q_bytes + lane * heads * (GRANULE * ROW_BYTES)
                    for p in range_constexpr(self.config.width // COLUMNS):
                        ptx.tma_load_3d(at + p * t.m * ROW_BYTES, descriptor, COLUMNS * p, row, head,
                                        (bars.q + stage).toint())  # fmt: skip
                # Of a part not sooner: what a block has taken waits for it, and parts differ in length.
                if partial >= 0:
                    cute.arch.mbarrier_wait(bars.ending, turn & 1)
                taken = Int32(0)
                if lane == 0:
                    taken = cute.arch.atomic_add(mControl.iterator, Int32(1))
                    if taken == items - 1:  # of as many takings as items: the last puts the counter back
                        mControl[0] = 0
                index = blocks + cute.arch.shuffle_sync(taken, offset=0)
            else:
                cute.arch.mbarrier_wait(bars.free + stage, phase ^ 1)
                if lane == 0:
                    slots[stage, 0] = Int32(0)
                    cute.arch.mbarrier_arrive(bars.item + stage)
            turn += 1

    @cute.jit
    def produce(self, src, of_v: cutlass.Constexpr, maps, sX, slots, bars, full, free):
        """Warps 0 and 1: load the tiles of K, or of V, of each item."""
        t = self.tile
        lane = cute.arch.lane_idx()
        base = sX.iterator.toint()
        whole, single, scratch = [ptx.descriptor_address(m) for m in maps]
        place = cute.make_rmem_tensor(2, Int32)
        stages = t.v_stages if const_expr(of_v) else t.k_stages
        turn, tiles, going = Int32(0), Int32(0), Int32(1)
        while going == 1:
            slot, slot_phase = turn % t.q_stages, (turn // t.q_stages) & 1
            cute.arch.mbarrier_wait(bars.item + slot, slot_phase)
            going = slots[slot, 0]
            if going == 1:
                request, n_min, n_max = slots[slot, 1], slots[slot, 7], slots[slot, 8]
                box0 = Int32(0)
                if const_expr(self.config.load == "slots"):
                    box0 = src.first_box[request]
                here = SimpleNamespace(
                    table=src.table, page_size=src.page_size, flat=src.flat, gathered=src.gathered,
                    first_slots=src.first_slots, request=request, head=slots[slot, 6],
                    lo=slots[slot, 11], hi=slots[slot, 4], box0=box0, whole=whole, row=single, scratch=scratch,
                )  # fmt: skip
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars.free + slot)
                if n_max > n_min:
                    self.loaders[of_v].find(here, (n_max - 1) * t.n, lane, place)
                for i in cutlass.range(n_max - n_min, unroll=1):
                    first_key = (n_max - 1 - i) * t.n
                    stage, phase = tiles % stages, (tiles // stages) & 1
                    cute.arch.mbarrier_wait(free + stage, phase ^ 1)
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.loaders[of_v].bytes)
                    cute.arch.sync_warp()
                    self.loaders[of_v].issue(here, first_key, lane, place, base + stage * self.loaders[of_v].bytes,
                                             (full + stage).toint())  # fmt: skip
                    if i + 1 < n_max - n_min:  # the next tile's table entries, while this one is on its way
                        self.loaders[of_v].find(here, first_key - t.n, lane, place)
                    tiles += 1
                if const_expr(not of_v):  # noqa: SIM102 (one is settled when compiled, one when run)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(bars.ending)
            turn += 1

    @cute.jit
    def consume(self, qk, pv, sQ, sK, sV, slots, bars, mO, mLSE, mSinks, mPartO, mPartLSE, want_lse, has_sinks, scale,
                inner, left, right, ratio):  # fmt: skip
        """A consumer warpgroup: the two products and the softmax of its 64 rows, item after item."""
        t, d_v = self.tile, self.config.width_v
        tid, _, _ = cute.arch.thread_idx()
        thread = tid - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        warp, lane = cute.arch.make_warp_uniform(thread // 32 % 4), cute.arch.lane_idx()
        mine = cute.make_layout(t.groups, stride=128)(group)
        qk_mine, pv_mine = qk.get_slice(mine), pv.get_slice(mine)
        sVt = cute.composition(sV, cute.make_ordered_layout((d_v, t.n, t.v_stages), order=(1, 0, 2)))
        w = SimpleNamespace(
            group=group, warp=warp, lane=lane, qk=qk, pv=pv, bars=bars, scale=scale, inner=inner,
            tSrQ=qk_mine.make_fragment_A(qk_mine.partition_A(sQ)),  # (MMA, 1, d / 16, q_stages)
            tSrK=qk_mine.make_fragment_B(qk_mine.partition_B(sK)),  # (MMA, 1, d / 16, stages)
            tOrV=pv_mine.make_fragment_B(pv_mine.partition_B(sVt)),  # (MMA, 1, n / 16, stages)
            tOrP=pv_mine.make_fragment_A(pv_mine.partition_shape_A((t.m, t.n))),  # (MMA, 1, n / 16)
            tOrO=cute.make_rmem_tensor(pv_mine.partition_shape_C((t.m, d_v)), Float32),
            starts=cute.make_rmem_tensor(2, Int32), stops=cute.make_rmem_tensor(2, Int32),
            heads=cute.make_rmem_tensor(2, Int32), queries=cute.make_rmem_tensor(2, Int32),
            top=cute.make_rmem_tensor(2, Float32), total=cute.make_rmem_tensor(2, Float32),
            decay=cute.make_rmem_tensor(2, Float32),
        )  # fmt: skip
        turn, tiles, going = Int32(0), Int32(0), Int32(1)
        while going == 1:
            slot, slot_phase = turn % t.q_stages, (turn // t.q_stages) & 1
            cute.arch.mbarrier_wait(bars.item + slot, slot_phase)
            going = slots[slot, 0]
            if going == 1:
                row0, q_len, kv_len = slots[slot, 2], slots[slot, 3], slots[slot, 4]
                n_min, n_max = slots[slot, 7], slots[slot, 8]
                for r in range_constexpr(2):  # a warp's rows are two granules, a thread's one row of each
                    granule = slots[slot, 5] + group * 8 + warp * 2 + r
                    w.queries[r] = GRANULE * (granule // ratio)
                    w.heads[r] = slots[slot, 6] * ratio + granule % ratio
                    position = kv_len - q_len + w.queries[r] + lane // 4
                    w.starts[r] = position - left
                    w.stops[r] = cutlass.min(kv_len, position + right + 1)
                    w.top[r], w.total[r] = -Float32.inf, Float32(0.0)
                cute.arch.mbarrier_wait(bars.q + slot, slot_phase)
                if n_max > n_min:
                    clear_hi = cutlass.max(n_min, cutlass.min(slots[slot, 10], n_max - 1))
                    clear_lo = cutlass.max(n_min, cutlass.min(slots[slot, 9], clear_hi))
                    begun = tiles
                    self.first_tile(w, slot, n_max - 1, tiles)
                    tiles += 1
                    for i in cutlass.range(n_max - 1 - clear_hi, unroll=1):
                        self.next_tile(w, slot, n_max - 2 - i, tiles, begun, True)
                        tiles += 1
                    for i in cutlass.range(clear_hi - clear_lo, unroll=1):
                        self.next_tile(w, slot, clear_hi - 1 - i, tiles, begun, False)
                        tiles += 1
                    for i in cutlass.range(clear_lo - n_min, unroll=1):
                        self.next_tile(w, slot, clear_lo - 1 - i, tiles, begun, True)
                        tiles += 1
                    self.last_product(w, tiles, begun)
                if slots[slot, 12] < 0:
                    self.finish(w, mO, mLSE, mSinks, want_lse, has_sinks, row0, q_len,
                                sQ.iterator.toint() + slot * self.q_bytes)  # fmt: skip
                else:
                    self.finish_part(w, mPartO, mPartLSE, slots[slot, 12] * t.m + 64 * group + 16 * warp)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars.free + slot)
            turn += 1

    @cute.jit
    def release(self, w, barrier):
        """One arrival a warp: each has waited for its own part of the product."""
        if w.lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def multiply(self, mma, acc, a, b, onto: Boolean):
        """Issue a product over all of k as one group, onto what acc holds or over it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, onto)
        for k in range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def scores(self, w, slot, stage):
        """Issue S = Q K^T of a tile."""
        acc = cute.make_rmem_tensor(w.qk.partition_shape_C((self.tile.m, self.tile.n)), Float32)
        self.multiply(w.qk, acc, w.tSrQ[None, None, None, slot], w.tSrK[None, None, None, stage], Boolean(False))
        return acc

    @cute.jit
    def find_top(self, w, acc, n, masked: cutlass.Constexpr, first: cutlass.Constexpr):
        """Cap and hide scores, find the rows' maxima; whether the output must be rescaled."""
        if const_expr(self.config.softcap):
            softmax.soften(acc, w.inner)
        if const_expr(masked):
            mask.apply(acc, w.starts, w.stops, n * self.tile.n, w.lane)
        return softmax.find_top(acc, w.top, w.decay, w.scale, first)

    @cute.jit
    def first_tile(self, w, slot, n, tiles):
        """Scores and weights of an item's first tile; nothing to do under them yet."""
        stage, phase = tiles % self.tile.k_stages, (tiles // self.tile.k_stages) & 1
        cute.arch.mbarrier_wait(w.bars.k + stage, phase)
        acc = self.scores(w, slot, stage)
        warpgroup.wait_group(0)
        self.release(w, w.bars.k_free + stage)
        self.find_top(w, acc, n, True, True)
        softmax.exponentiate(acc, w.top, w.scale, True)
        softmax.add_up(acc, w.total, w.decay, True)
        softmax.pack(acc, w.tOrP, self.dtype)

    @cute.jit
    def next_tile(self, w, slot, n, tiles, begun, masked: cutlass.Constexpr):
        """Scores of tile n under the output product of the tile before it."""
        t = self.tile
        stage, phase = tiles % t.k_stages, (tiles // t.k_stages) & 1
        before = tiles - 1
        v_stage, v_phase = before % t.v_stages, (before // t.v_stages) & 1
        cute.arch.mbarrier_wait(w.bars.k + stage, phase)
        acc = self.scores(w, slot, stage)
        cute.arch.mbarrier_wait(w.bars.v + v_stage, v_phase)
        self.multiply(w.pv, w.tOrO, w.tOrP, w.tOrV[None, None, None, v_stage], before != begun)
        warpgroup.wait_group(1)
        self.release(w, w.bars.k_free + stage)
        moved = self.find_top(w, acc, n, masked, False)
        softmax.exponentiate(acc, w.top, w.scale, masked)
        softmax.add_up(acc, w.total, w.decay, False)
        if moved:  # rarely; the branch also keeps the wait below from being moved up among the exponentials
            warpgroup.wait_group(0)
            softmax.rescale(w.tOrO, w.decay)
        warpgroup.wait_group(0)
        self.release(w, w.bars.v_free + v_stage)
        softmax.pack(acc, w.tOrP, self.dtype)

    @cute.jit
    def last_product(self, w, tiles, begun):
        """The output product of an item's last tile."""
        t = self.tile
        before = tiles - 1
        stage, phase = before % t.v_stages, (before // t.v_stages) & 1
        cute.arch.mbarrier_wait(w.bars.v + stage, phase)
        self.multiply(w.pv, w.tOrO, w.tOrP, w.tOrV[None, None, None, stage], before != begun)
        warpgroup.wait_group(0)
        self.release(w, w.bars.v_free + stage)

    @cute.jit
    def finish(self, w, mO, mLSE, mSinks, want_lse, has_sinks, row0, q_len, smem):
        """Divide, and write a warp's two granules of out and lse through its own rows of the query tile."""
        t, d_v = self.tile, self.config.width_v
        lane = w.lane
        factor = cute.make_rmem_tensor(2, Float32)
        for r in range_constexpr(2):
            query = w.queries[r] + lane // 4
            total = softmax.quad_sum(w.total[r])
            top = w.top[r] * w.scale
            gain = Float32(1.0)
            if has_sinks == 1:
                sink = mSinks[w.heads[r]] * LOG2E
                both = cute.arch.fmax(top, sink)
                base = Float32(0.0) if both == -Float32.inf else both
                gain = ptx.exp2(top - base)
                total = total * gain + ptx.exp2(sink - base)
                top = both
            empty = total == 0.0
            factor[r] = Float32(0.0) if empty else gain * cute.arch.rcp_approx(total)
            if want_lse == 1 and lane % 4 == 0 and query < q_len:
                mLSE[w.heads[r], row0 + query] = -Float32.inf if empty else (top + ptx.log2(total)) * LN2
        softmax.divide(w.tOrO, factor)
        # Every warp of the group must be done reading the query tile before any row of it is overwritten.
        cute.arch.barrier(barrier_id=GROUP + w.group, number_of_threads=128)
        mine = smem + (64 * w.group + 16 * w.warp) * ROW_BYTES
        panel_bytes = t.m * ROW_BYTES
        line = mine + lane // 4 * ROW_BYTES + lane % 4 * 4
        for chunk in range_constexpr(8):
            at = line + (chunk ^ (lane // 4)) * 16  # the swizzle: 16-byte chunks change places by the row's number
            for panel in range_constexpr(d_v // COLUMNS):
                for r in range_constexpr(2):
                    e = softmax.element(8 * panel + chunk, r, 0)
                    value = ptx.pack_half2(w.tOrO[e], w.tOrO[e + 1], self.dtype)
                    ptx.store_shared(at, panel * panel_bytes + r * GRANULE * ROW_BYTES, value)
        # The copy engine writes the next query tile here: these writes come first. Not after the stores to global
        # memory below, which the fence would wait for.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        chunks = d_v // 8  # of a row
        at_once = 32 // chunks  # rows that a warp writes together
        row, chunk = lane // chunks, lane % chunks
        source = mine + chunk // 8 * panel_bytes + row * ROW_BYTES
        for r in range_constexpr(2):
            first = row0 + w.queries[r] + row
            start = cute.domain_offset((first, w.heads[r], 8 * chunk), mO).iterator.toint()
            left = q_len - w.queries[r] - row
            words = []  # all of a granule's loads before its stores, which would each wait for one
            for i in range_constexpr(GRANULE // at_once):
                swizzled = source + (chunk % 8 ^ (row + i * at_once)) * 16
                words.append(ptx.load_shared_16_bytes(swizzled, (GRANULE * r + i * at_once) * ROW_BYTES))
            for i in range_constexpr(GRANULE // at_once):
                if i * at_once < left and chunk < self.config.d_v // 8:
                    ptx.store_16_bytes(start + Int64(2 * i * at_once) * mO.stride[0], *words[i])

    @cute.jit
    def finish_part(self, w, mPartO, mPartLSE, row):
        """Divide, and leave a warp's sixteen rows for the combine: fp32, lse in base 2, no sink yet."""
        lane = w.lane
        factor = cute.make_rmem_tensor(2, Float32)
        for r in range_constexpr(2):
            total = softmax.quad_sum(w.total[r])
            empty = total == 0.0
            factor[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log = -Float32.inf if empty else w.top[r] * w.scale + ptx.log2(total)
            if lane % 4 == 0:
                mPartLSE[row + 8 * r + lane // 4] = log
        softmax.divide(w.tOrO, factor)
        for r in range_constexpr(2):
            start = cute.domain_offset((row + 8 * r + lane // 4, lane % 4 * 2), mPartO).iterator.toint()
            for j in range_constexpr(self.config.d_v // 8):
                e = softmax.element(j, r, 0)
                ptx.store_global_pair(start + 32 * j, w.tOrO[e], w.tOrO[e + 1])
