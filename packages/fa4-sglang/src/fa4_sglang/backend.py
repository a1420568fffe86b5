"""SGLang's AttentionBackend over fa4_core.prefill(): for prefill rows, and for decode rows where asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from fa4_core import LayerSpec, UnsupportedError, counters, prefill, startup

from . import compat, limits, translate
from .plugin import NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_started: set[tuple[Any, ...]] = set()


class FA4Backend(AttentionBackend):
    """Attention of a whole step through fa4_core.prefill(), over SGLang's own pools and page size.

    Args:
        model_runner: With its model loaded and its pools made.

    Raises:
        UnsupportedError: The model, an option of the server or the pool is one that is not served; all reasons listed.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.device = torch.device(model_runner.device)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.dtype = model_runner.dtype
        self.invariant = bool(compat.option(model_runner.server_args, "enable_deterministic_inference"))
        self.forward_metadata: translate.Step | None = None
        found = list(translate.layers(model_runner.model))
        limits.check(model_runner, {name: layer for name, layer, _ in found})
        self._window_layers = translate.window_layers(self.token_to_kv_pool)
        self._specs: dict[RadixAttention, LayerSpec] = {}
        for _, layer, sinks in found:
            self._specs[layer] = self._spec(layer, sinks)
        self._start()

    def _start(self) -> None:
        """Once a process and kind of model: SGLang may make several backends, and a draft model has one of its own."""
        compat.warn_if_untested()
        specs = tuple(dict.fromkeys(self._specs.values()))
        key = (specs, self.page_size, self.device, self.invariant)
        if key not in _started:
            where = {"page_size": self.page_size, "device": self.device, "invariant": self.invariant}
            startup.start("sglang", compat.version(), specs, **where)
            # SGLang has made its pools by now; at least a server that lacks the room says so when it starts.
            startup.reserve(specs, **where)
            _started.add(key)

    def _spec(self, layer: RadixAttention, sinks: bool) -> LayerSpec:
        why = limits.refuse_layer(layer)
        if why is not None:
            raise UnsupportedError(f"layer {layer.layer_id}", {NAME: why})
        return translate.spec(layer, self.dtype, self.token_to_kv_pool.dtype, sinks)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan nothing yet, only say what the step is; its first layer plans it.

        Raises:
            ValueError: A mode that is not served.
        """
        step = translate.step(forward_batch, self.req_to_token_pool.req_to_token, self.token_to_kv_pool, self.page_size)
        self.forward_metadata = step
        # Counted here and not in the layers, so that a layer which never came through prefill() shows.
        counters.add("sglang.steps")
        counters.add("sglang.scheduled_tokens", step.tokens)
        counters.add(f"sglang.scheduled_tokens.{forward_batch.forward_mode.name}", step.tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Asked for only where this backend decodes inside CUDA graphs.

        Raises:
            UnsupportedError: Always.
        """
        hint = "use --disable-cuda-graph, or let another backend decode with --decode-attention-backend"
        raise UnsupportedError("decoding in CUDA graphs", {NAME: hint})

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **unserved: Any,
    ) -> torch.Tensor:
        """Attention of the step's rows over one layer's cached and new keys.

        Args:
            q: [rows, q_heads * head_dim]; rows past the step's are padding.
            k: [rows, kv_heads, head_dim], or None where the layer reads keys that another has written.
            v: [rows, kv_heads, head_dim_v], or None likewise.
            layer: The layer.
            forward_batch: The step that init_forward_metadata() was given.
            save_kv_cache: Write k and v to the pool first; False where the model has.
            sinks: [q_heads], bfloat16 or float32.
            **unserved: Anything else that SGLang or a model passes; None or False is the same as nothing.

        Returns:
            [rows, q_heads * head_dim_v]; padding rows are 0.

        Raises:
            ValueError: A keyword that is not served was given: without it the answer would be wrong.
        """
        given = [name for name, value in unserved.items() if value is not None and value is not False]
        if given:
            raise ValueError(f"{', '.join(given)} given to layer {layer.layer_id}; allowed: sinks, save_kv_cache")
        if self.forward_metadata is None:
            raise ValueError("forward_metadata was None; allowed: a call after init_forward_metadata()")
        step = self.forward_metadata
        if save_kv_cache and k is not None:
            where = compat.write_loc(forward_batch, layer, step.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        spec = self._specs.get(layer)
        if spec is None or spec.sinks != (sinks is not None):
            # A layer that the walk did not find, or sinks that were not where it looked.
            spec = self._specs[layer] = self._spec(layer, sinks is not None)
        batch = step.window_batch if layer.layer_id in self._window_layers else step.batch
        rows = q.view(q.shape[0], spec.q_heads, spec.head_dim)
        out = rows.new_empty((rows.shape[0], spec.q_heads, spec.head_dim_v))
        out[step.tokens :].zero_()
        prefill(
            rows, *translate.pages(self.token_to_kv_pool, layer, self.page_size), batch, spec,
            scale=layer.scaling, softcap=layer.logit_cap or 0.0, sinks=sinks, out=out, invariant=self.invariant,
        )  # fmt: skip
        return out.flatten(1)

    forward_decode = forward_extend  # a decode row is a prefill of one token
