"""NVFP4 and FP8 experts on Blackwell through FlashInfer's TRTLLM-Gen kernels.

The routed kernels take ids and weights and follow a dispatch; the logits kernels choose the experts themselves
(`TrtllmGenExecutor.run_logits`): a layer uses them in a world of one, where nothing has to travel. Both apply the
routing weights and sum over K. Routed scaling is in the weights already (`eprt.routing`), so the routed kernels are
given none; the logits kernels apply the model's, once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

from eprt.config import Routing
from eprt.errors import ConfigError, InputError
from eprt.experts.base import PreparedExecutor
from eprt.experts.blackwell.trtllm_formats import FORMATS, load_kernels
from eprt.experts.rules import TRTLLM_LOGITS
from eprt.tokens import FlatTokens, Payload, merge_repeats
from eprt.weights import ExpertWeights


class TrtllmGenExecutor(PreparedExecutor):
    """Takes FlatTokens. One call routes, computes, weights and sums; every output row is written (0 where nothing is
    local).

    Raises:
        ConfigError: missing input scales.
    """

    kernels: ClassVar[SimpleNamespace | None] = None  # None: FlashInfer's, imported when an executor is built

    def _prepare(self, weights: ExpertWeights) -> None:
        self._kernels = type(self).kernels or load_kernels()
        format = FORMATS[self.config.weight_format]
        self._format = format(self._kernels, weights, self.config.activation, self.device)
        # ExpertMajorTokens reach this executor through an adapter, as L * M rows of one top-k entry.
        adapted = self.runtime.token_format == "expert_major"
        blocks = self.shard.num_local_experts if adapted else 1
        world = self.shard.num_experts // self.shard.num_local_experts * self.shard.moe_tp_size
        # The tuner's ladder of batch sizes ends at the most rows a dispatcher can hand over.
        self._most_rows = 1 << (blocks * world * self.runtime.max_tokens_per_rank - 1).bit_length()

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        # Of two entries with one expert the routing kernel keeps one; only a table of ids can hold such rows.
        tokens = merge_repeats(tokens) if self.config.routing.method == "hash" else tokens
        routing = {
            "topk_ids": (tokens.ids.contiguous(), tokens.weights.contiguous()),
            "routing_bias": None,
            "top_k": tokens.ids.shape[1],
            "n_group": None,
            "topk_group": None,
            "routed_scaling_factor": None,
            "routing_method_type": int(self._kernels.enums.RoutingMethodType.TopK),
        }
        self._call(self._kernels.routed[self._format.entry], tokens.hidden, routing, out)

    def run_logits(self, hidden: Payload, logits: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, num_experts = hidden.data.shape[0], self.config.num_experts
        if tuple(logits.shape) != (rows, num_experts) or logits.dtype not in (torch.bfloat16, torch.float32):
            raise InputError(
                f"router logits are {tuple(logits.shape)} {logits.dtype}: expected [{rows}, {num_experts}] bf16 or "
                "float32"
            )
        out = torch.empty((rows, self.config.hidden_size), dtype=torch.bfloat16, device=logits.device)
        if rows == 0:
            return out
        routing = {
            "routing_logits": logits.contiguous(),
            "top_k": self.config.top_k,
            **logits_routing(self.config.routing, self._kernels.enums),
        }
        routing["routing_bias"] = None
        if self.config.routing.method == "grouped_sigmoid":  # its kernel reads a bias whether there is one or not
            routing["routing_bias"] = logits.new_zeros(num_experts) if bias is None else bias
        self._call(self._kernels.logits[self._format.entry], hidden, routing, out)
        return out

    def _call(self, kernel: Callable[..., Any], hidden: Payload, routing: dict[str, Any], out: torch.Tensor) -> None:
        """Run `kernel` into `out`, through a wider tensor where H is padded."""
        enums, padded = self._kernels.enums, self._format.hidden
        activation = enums.ActivationType.Swiglu if self.config.activation.gated else enums.ActivationType.Relu2
        direct = out.shape[1] == padded and out.is_contiguous()
        whole = out if direct else out.new_empty((out.shape[0], padded))
        kernel(
            **self._format.arguments(hidden),
            **routing,
            num_experts=self.shard.num_experts,
            intermediate_size=self._format.intermediate,
            local_expert_offset=self.shard.first_expert,
            local_num_experts=self.shard.num_local_experts,
            do_finalize=True,
            activation_type=int(activation),
            tune_max_num_tokens=self._most_rows,
            output=whole,
        )
        if whole is not out:
            out.copy_(whole[:, : out.shape[1]])

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Lets FlashInfer build its kernels and time their tactics for its ladder of batch sizes up to `max_rows`."""
        self._most_rows = max(self._most_rows, 1 << (max_rows - 1).bit_length())
        tokens = self._even_tokens(max_rows, top_k)
        with self._kernels.autotune(True):
            self(tokens)
            shard = self.shard
            if shard.num_local_experts == shard.num_experts and shard.moe_tp_size == 1 and self.takes_logits:
                ids = tokens.ids[:, : self.config.top_k].long()
                logits = torch.zeros(
                    (max_rows, self.config.num_experts), dtype=torch.float32, device=self.device
                ).scatter_(1, ids, 1.0)
                self.run_logits(tokens.hidden, logits)


def logits_routing(routing: Routing, enums: ModuleType) -> dict[str, Any]:
    """Returns the keywords that tell the logits kernels a routing method; raises ConfigError for one they lack."""
    name = TRTLLM_LOGITS.get((routing.method, routing.renormalize))
    grouped = name == "DeepSeekV3"
    if name is None or (routing.scaling_factor != 1.0 and not grouped):
        raise ConfigError(
            f"the logits kernels have no {routing.method} with renormalize={routing.renormalize} and scaling_factor "
            f"{routing.scaling_factor}: route with eprt.routing and call the executor with the TopK"
        )
    return {
        "routing_method_type": int(getattr(enums.RoutingMethodType, name)),
        "n_group": routing.num_groups if grouped else None,
        "topk_group": routing.topk_groups if grouped else None,
        "routed_scaling_factor": routing.scaling_factor if grouped else None,
    }
