"""Our Hopper kernel, FA3, flash-attn-4 and cuDNN on the same paged prefill work, in one process.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200.json

Every variant runs once a round, in random order, so that all see the same clocks; a spin kernel ahead of each hides
the host's launch time; medians are printed. Ratios are taken within a run, never across runs: clocks move by ten
per cent from machine to machine and within minutes.

FA3 is a library named by FA3_SO (vLLM's build); flash-attn-4 is used where it imports; compiled variants of ours are
taken from FA4_HOPPER_OBJECTS where it is set, and compiled here where it is not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fa4_core import LayerSpec, PrefillBatch
from fa4_core.kernels.hopper import HopperKernel

DEV = "cuda"
PAGES = {"128": (128, True), "16": (16, True), "1-runs": (1, False), "1-random": (1, True)}


@dataclass(frozen=True)
class Work:
    """A step: new tokens and keys of each request, the heads, the window's left side (-1 for none)."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    hq: int
    hk: int
    d: int
    left: int = -1

    @property
    def flop(self) -> int:
        """Of the visible pairs alone."""
        pairs = 0
        for q, k in zip(self.q_lens, self.kv_lens):
            seen = torch.arange(k - q + 1, k + 1, dtype=torch.int64)
            pairs += int((seen if self.left < 0 else seen.clamp(max=self.left + 1)).sum())
        return 4 * pairs * self.hq * self.d


def works() -> list[Work]:
    """What is measured."""
    rng = random.Random(1)
    mixed_q = [rng.choice([37, 150, 411, 900, 1800, 3500]) for _ in range(12)]
    mixed_k = [n + rng.choice([0, 0, 512, 4096]) for n in mixed_q]
    t = tuple
    return [
        Work("1x16384", (16384,), (16384,), 32, 8, 128),
        Work("16x1024", (1024,) * 16, (1024,) * 16, 32, 8, 128),
        Work("64x256", (256,) * 64, (256,) * 64, 32, 8, 128),
        Work("4x2048 behind 30720", (2048,) * 4, (32768,) * 4, 32, 8, 128),
        Work("8x512 behind 4096", (512,) * 8, (4608,) * 8, 32, 8, 128),
        Work("mixed12", t(mixed_q), t(mixed_k), 32, 8, 128),
        Work("1x512 behind 32768, 8/1", (512,), (33280,), 8, 1, 128),
        Work("1x512 behind 32768, 32/8", (512,), (33280,), 32, 8, 128),
        Work("2x8192 d64", (8192,) * 2, (8192,) * 2, 64, 8, 64),
        Work("2x8192 d64 window 127", (8192,) * 2, (8192,) * 2, 64, 8, 64, 127),
        Work("2x8192 d256", (8192,) * 2, (8192,) * 2, 16, 8, 256),
        Work("4x32768", (32768,) * 4, (32768,) * 4, 32, 8, 128),
    ]


def paged(w: Work, page: int, scattered: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_pages, v_pages, page_table) of random keys."""
    counts = [-(-k // page) for k in w.kv_lens]
    k = torch.randn(sum(counts) + 1, page, w.hk, w.d, device=DEV, dtype=torch.bfloat16)
    order = torch.randperm(sum(counts), device=DEV) if scattered else torch.arange(sum(counts), device=DEV)
    table, at = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=DEV), 0
    for i, n in enumerate(counts):
        table[i, :n] = order[at : at + n].int() + 1
        at += n
    return k, torch.randn_like(k), table


def fa3(q, k, v, cu_q, kv_lens, max_q, max_k, table, left):
    """vLLM's build of FA3, as vLLM calls it."""
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, cu_q, None, None, None, kv_lens, max_q, max_k, table, None, None, None, None,
        None, None, None, None, q.shape[-1] ** -0.5, True, left, 0 if left >= 0 else -1, 0.0, True, None, 0, None, 0,
        None, 1, 0, None)[0]  # fmt: skip


def variants(w: Work, peers: set[str]) -> dict[str, object]:
    """A call for each kernel and page column."""
    q = torch.randn(sum(w.q_lens), w.hq, w.d, device=DEV, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    cu = torch.tensor([0, *itertools.accumulate(w.q_lens)], dtype=torch.int32, device=DEV)
    lens = torch.tensor(w.kv_lens, dtype=torch.int32, device=DEV)
    top_q, top_k, scale = max(w.q_lens), max(w.kv_lens), w.d**-0.5
    spec = LayerSpec(w.hq, w.hk, w.d, window=(None if w.left < 0 else w.left, 0))
    run: dict[str, object] = {}
    for page, (size, scattered) in PAGES.items():
        k, v, table = paged(w, size, scattered)
        batch = PrefillBatch(cu, lens, table, size, host_q_lens=w.q_lens, host_kv_lens=w.kv_lens)
        plan = HopperKernel().plan(batch, spec, invariant=False)
        run[f"ours {page}"] = lambda k=k, v=v, p=plan: p.run(
            q, k, v, scale=scale, softcap=0.0, sinks=None, out=out, lse=None
        )
        if "fa3" in peers:
            run[f"fa3 {page}"] = lambda k=k, v=v, t=table: fa3(q, k, v, cu, lens, top_q, top_k, t, w.left)
        if "fa4" in peers and page != "1-runs":
            from flash_attn.cute import flash_attn_varlen_func

            window = (w.left, 0) if w.left >= 0 else (None, None)
            run[f"fa4 {page}"] = lambda k=k, v=v, t=table, window=window: flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu, seqused_k=lens, max_seqlen_q=top_q, max_seqlen_k=top_k, page_table=t,
                causal=w.left < 0, window_size=window)  # fmt: skip
    even = w.q_lens == w.kv_lens and len(set(w.q_lens)) == 1
    if "cudnn" in peers and even and w.d <= 128 and w.left < 0 and top_q <= 16384:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        shapes = [(len(w.q_lens), h, top_q, w.d) for h in (w.hq, w.hk, w.hk)]
        dense = [torch.randn(*s, device=DEV, dtype=torch.bfloat16) for s in shapes]

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

        run["cudnn dense"] = cudnn
    return run


def measure(run: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    for f in run.values():
        f()
        f()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in run}
    order = list(run)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(1_500_000)
            a.record()
            run[name]()
            b.record()
            torch.cuda.synchronize()
            times[name].append(a.elapsed_time(b))
    return {name: statistics.median(t) for name, t in times.items()}


def host_costs() -> dict[str, float]:
    """Microseconds: a plan of 1, 64 and 512 requests, and a warm call of a layer."""
    costs = {}
    spec = LayerSpec(32, 8, 128)
    for n in (1, 64, 512):
        q_lens = [16384 // n] * n
        cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32, device=DEV)
        table = torch.arange(n * (-(-q_lens[0] // 16)), device=DEV, dtype=torch.int32).view(n, -1)
        batch = PrefillBatch(cu, torch.tensor(q_lens, dtype=torch.int32, device=DEV), table, 16,
                             host_q_lens=q_lens, host_kv_lens=q_lens)  # fmt: skip
        took = []
        for _ in range(20):
            torch.cuda.synchronize()
            t = time.perf_counter()
            plan = HopperKernel().plan(batch, spec, invariant=False)
            took.append(time.perf_counter() - t)
        costs[f"plan of {n}"] = statistics.median(took) * 1e6
    q = torch.randn(128, 32, 128, device=DEV, dtype=torch.bfloat16)
    k = torch.randn(8, 16, 8, 128, device=DEV, dtype=torch.bfloat16)
    cu = torch.tensor([0, 128], dtype=torch.int32, device=DEV)
    table = torch.arange(8, device=DEV, dtype=torch.int32).view(1, -1)
    batch = PrefillBatch(cu, cu[1:].clone(), table, 16, host_q_lens=[128], host_kv_lens=[128])
    plan, out = HopperKernel().plan(batch, spec, invariant=False), torch.empty_like(q)
    took = []
    for _ in range(200):
        t = time.perf_counter()
        plan.run(q, k, k, scale=0.1, softcap=0.0, sinks=None, out=out, lse=None)
        took.append(time.perf_counter() - t)
        torch.cuda.synchronize()
    costs["call"] = statistics.median(took) * 1e6
    return costs


def table(rows: list[dict]) -> str:
    """The ratios to FA3 as a Markdown table, TFLOP/s in brackets."""
    lines = ["| work | " + " | ".join(f"page {p}" for p in PAGES) + " |", "|---|" + "---|" * len(PAGES)]
    for work in dict.fromkeys(r["work"] for r in rows):
        cells = [next(r for r in rows if (r["work"], r["page"]) == (work, p)) for p in PAGES]
        lines.append(f"| {work} | " + " | ".join(f"{r['ratio_fa3'] or 0:.2f} ({r['ours']:.0f})" for r in cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """TFLOP/s of each kernel on each work at page 16, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    mine = [r for r in rows if r["page"] == "16"]
    fig, ax = plt.subplots(figsize=(12, 5))
    for i, name in enumerate(("ours", "fa3", "fa4", "cudnn")):
        ax.bar([x + 0.2 * i for x in range(len(mine))], [r[name] or 0 for r in mine], 0.2, label=name)
    ax.set_xticks([x + 0.3 for x in range(len(mine))], [r["work"] for r in mine], rotation=30, ha="right")
    ax.set_ylabel("TFLOP/s of visible pairs")
    ax.set_title("Paged prefill, pages of 16 (cuDNN: dense)")
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, and keep."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=24)
    ap.add_argument("--only", default="", help="a part of the names of the work to run")
    ap.add_argument("--peers", default="fa3,fa4,cudnn")
    ap.add_argument("--commit", default="")
    ap.add_argument("--out", type=Path)
    ap.add_argument("--draw", type=Path, help="measure nothing: print the table of this result and draw it beside it")
    args = ap.parse_args()
    if args.draw:
        rows = json.loads(args.draw.read_text())["rows"]
        print(table(rows))
        plot(rows, args.draw.with_suffix(".png"))
        return
    torch.manual_seed(0)
    random.seed(1)
    peers = set(args.peers.split(","))
    if "fa3" in peers:
        torch.ops.load_library(os.environ["FA3_SO"])
    rows = []
    for w in works():
        if args.only not in w.name:
            continue
        run = variants(w, peers)
        ms = measure(run, max(6, args.rounds // 3) if w.name == "4x32768" else args.rounds)
        rate = {name: round(w.flop / t / 1e9, 1) for name, t in ms.items()}
        for page in PAGES:
            ours, other = rate[f"ours {page}"], rate.get(f"fa3 {page}")
            rows.append({"work": w.name, "page": page, "ours": ours, "fa3": other, "fa4": rate.get(f"fa4 {page}"),
                         "cudnn": rate.get("cudnn dense"),
                         "ratio_fa3": round(ours / other, 3) if other else None})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        del run
        torch.cuda.empty_cache()
    costs = host_costs()
    print(table(rows), json.dumps(costs), sep="\n")
    if args.out:
        smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        result = {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
                  "cutlass_dsl": os.environ.get("FA4_HOPPER_DSL", ""), "commit": args.commit, "rows": rows,
                  "host_us": costs}  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
