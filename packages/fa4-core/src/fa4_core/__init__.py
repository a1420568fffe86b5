"""Prefill attention over paged KV caches: one call for vLLM, SGLang and whoever else keeps keys in pages.

Importing this package touches no CUDA and no engine.
"""

from .batch import PrefillBatch
from .counters import stats
from .errors import UnsupportedError
from .kernels import Kernel, Question, Verdict, all_kernels, explain, register, select
from .merge import merge_states
from .prefill import Capacity, Plan, plan, prefill
from .spec import LayerSpec
from .target import Target

__version__ = "0.1.0"

__all__ = [
    "Capacity",
    "Kernel",
    "LayerSpec",
    "Plan",
    "PrefillBatch",
    "Question",
    "Target",
    "UnsupportedError",
    "Verdict",
    "all_kernels",
    "explain",
    "merge_states",
    "plan",
    "prefill",
    "register",
    "select",
    "stats",
]
