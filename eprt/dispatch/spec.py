"""The facts that a dispatcher states: one row of the table in `eprt/dispatch/__init__.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eprt.config import CombineFormat, MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig, TokenFormat
from eprt.support import Device, Requirement, Support, refuse
from eprt.weights import NVFP4_BLOCK

FABRIC_BEYOND_HOST = 100  # SM from which NVLink joins the hosts of a rack (GB200 NVL72)
# Limits that a row states and an implementation is built on.
SYMM_MAX_RANKS = 8  # GPUs of one NVLink host
SYMM_R_BITS = 20  # of a flag of symm's kernels carry R
DEEPEP_MAX_TOKENS = 1024  # per rank: deep_ep 1.2.1, FINISHED_SUM_TAG of csrc/kernels/internode_ll.cu
FLASHINFER = Requirement("flashinfer", ("flashinfer-python",), "0.6.18", below="0.7.4")  # which has another all-to-all
PACKING_SM = 89  # from which Triton converts to E4M3, in codes of fp8_block and scales of nvfp4


@dataclass(frozen=True)
class DispatcherSpec:
    """Static facts of a dispatcher: readable without importing its kernels or owning its device.

    Attributes:
        name, path, summary: table key, "module:class", one line for `eprt explain`.
        formats, payloads: what it can emit; the first format is its native one.
        combine_payloads: formats in which outputs can be sent back, besides the tokens' own.
        shrink: when it can lose a rank and go on (`World.shrink`): at any moment; only between two steps, as its
            kernels wait for a lost rank until they trap; never (""). Where it can, ranks can leave on purpose, too.
        devices: device kinds it runs on.
        graph_safe: capture once, replay with new data, counts <= R and idle ranks.
        max_ranks: None means no limit of its own.
        top_k_sizes: each K that its kernels support; others are padded with entries that name no expert. None: any.
        hidden_sizes: each H that its kernels support; others are padded and trimmed. None: any.
        max_tokens: largest max_tokens_per_rank it can be sized for. None: memory is the limit.
        moe_tp: can deliver one token to the several ranks that share an expert.
        reach: how far apart its ranks may be: on one host, in one NVLink fabric (within a host before SM100), anywhere.
        sends: where a token's row is sent: to every rank, to each rank that holds one of its experts, or to each of
            its experts. The cost model counts bytes by it.
        requirement: package it needs, or None.
        invariant: (device kind, most ranks) with which a token's sum depends neither on its rank nor on the rest of
            the batch (`RuntimeConfig.batch_invariant`). A sum of two numbers has one order, of more it doesn't.
        preference: the largest comes first if there are no measured times.
    """

    name: str
    path: str
    summary: str
    formats: tuple[TokenFormat, ...]
    payloads: tuple[PayloadFormat, ...]
    devices: tuple[str, ...]
    graph_safe: bool
    combine_payloads: tuple[CombineFormat, ...] = ()
    shrink: Literal["anytime", "between steps", ""] = ""
    max_ranks: int | None = None
    top_k_sizes: tuple[int, ...] | None = None
    hidden_sizes: tuple[int, ...] | None = None
    max_tokens: int | None = None
    moe_tp: bool = True
    reach: Literal["host", "fabric", "network"] = "network"
    sends: Literal["everyone", "rank", "expert"] = "rank"
    requirement: Requirement | None = None
    invariant: tuple[tuple[str, float], ...] = ()
    preference: int = 0

    def supports(self, config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device) -> Support:
        """Tells whether this dispatcher can carry that layer there; needs no tensors, no GPU, no package (unless
        `device.installed`)."""
        refusals = (
            *self._format_refusals(config, runtime, device),
            *self._size_refusals(config, parallel, runtime, device),
        )
        if reason := self.lacks(runtime) or next((reason for failed, reason in refusals if failed), ""):
            return refuse(reason)
        if device.installed and self.requirement is not None and not (found := self.requirement.check()):
            return found
        return Support(True, "; ".join(self._remarks(config, runtime)))

    def _format_refusals(self, config: MoEConfig, runtime: RuntimeConfig, device: Device) -> list[tuple[bool, str]]:
        payload, H = runtime.payload, config.hidden_size
        packs, ragged = payload in ("fp8_block", "nvfp4"), payload == "nvfp4" and H % NVFP4_BLOCK != 0
        asked = runtime.token_format
        return [
            (device.kind not in self.devices, f"runs on {', '.join(self.devices)}, not on {device}"),
            (payload not in (None, *self.payloads), f"payload {payload}: carries {', '.join(self.payloads)} only"),
            (packs and 0 < device.sm < PACKING_SM, f"payload {payload}: packing it needs sm{PACKING_SM}, not {device}"),
            (ragged, f"payload nvfp4: hidden size must be a multiple of {NVFP4_BLOCK}, the model has {H}"),
            (asked not in (None, *self.formats), f"emits {', '.join(self.formats)} only, {asked} was asked for"),
        ]

    def _size_refusals(
        self, config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device
    ) -> list[tuple[bool, str]]:
        ranks, tokens = parallel.world_size, runtime.max_tokens_per_rank
        max_ranks, max_tokens = self.max_ranks or ranks, self.max_tokens or tokens
        near = self.reach == "host" or (self.reach == "fabric" and device.sm < FABRIC_BEYOND_HOST)
        far, tp, here = parallel.spans_hosts and near, parallel.moe_tp_size, parallel.ranks_per_host
        top_k, hidden = max(self.top_k_sizes or (config.top_k,)), max(self.hidden_sizes or (config.hidden_size,))
        ordered = dict(self.invariant).get(device.kind, 0)
        sums = f"adds up the outputs of more than {ordered} ranks" if ordered else "sums"
        return [
            (runtime.batch_invariant and ranks > ordered, f"batch_invariant: {sums} in no fixed order"),
            (ranks > max_ranks, f"at most {max_ranks} ranks, the world has {ranks}"),
            (far, f"needs all ranks on one NVLink {self.reach}, one host has {here} of {ranks}"),
            (tokens > max_tokens, f"at most {max_tokens} tokens a rank, max_tokens_per_rank is {tokens}"),
            (tp > 1 and not self.moe_tp, f"can't send one token to the {tp} MoE-TP ranks that share an expert"),
            (config.top_k > top_k, f"top-k at most {top_k}, the model has {config.top_k}"),
            (config.hidden_size > hidden, f"hidden size at most {hidden}, the model has {config.hidden_size}"),
        ]

    def lacks(self, runtime: RuntimeConfig) -> str:
        """Returns, as a reason, which option of `runtime` this dispatcher doesn't have; "" if it has them all."""
        if runtime.combine_payload is not None and runtime.combine_payload not in self.combine_payloads:
            return f"combine_payload {runtime.combine_payload}: brings outputs back in the tokens' own format only"
        if runtime.on_rank_lost != "restart" and not self.shrink:
            return f"on_rank_lost {runtime.on_rank_lost}: can't go on without a rank"
        return ""

    def padded_top_k(self, top_k: int) -> int:
        return top_k if self.top_k_sizes is None else min(k for k in self.top_k_sizes if k >= top_k)

    def padded_hidden(self, hidden_size: int) -> int:
        return hidden_size if self.hidden_sizes is None else min(h for h in self.hidden_sizes if h >= hidden_size)

    def _remarks(self, config: MoEConfig, runtime: RuntimeConfig) -> list[str]:
        top_k, hidden = self.padded_top_k(config.top_k), self.padded_hidden(config.hidden_size)
        waits = runtime.on_rank_lost != "restart" and self.shrink == "between steps"
        remarks = [
            (top_k != config.top_k, f"top-k {config.top_k} padded to {top_k}"),
            (hidden != config.hidden_size, f"hidden {config.hidden_size} padded to {hidden}"),
            (waits, "goes on without a rank that is lost between two steps; one lost inside a step is a restart"),
        ]
        return [remark for applies, remark in remarks if applies]
