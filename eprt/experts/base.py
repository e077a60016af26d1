"""Defines how experts are computed on received tokens: the contract that every executor keeps.

An `Executor` is what is called, with tokens of a format in its spec; a `PreparedExecutor` is built once from canonical
weights (its own layout is made then, expert by expert). It describes itself in an `ExecutorSpec` of the table in
`eprt/experts/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from eprt import expert_major
from eprt.config import MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig, TokenFormat, WeightFormat
from eprt.errors import ConfigError, InputError, UnsupportedError
from eprt.experts.in_place import by_slot, write_slots, write_whole
from eprt.placement import ExpertShard
from eprt.quant import encode_payload
from eprt.support import Device, Requirement, Support, refuse
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, merge_repeats
from eprt.weights import ExpertWeights

# (config, device, payload) -> why not, or ""
Rule = Callable[[MoEConfig, Device, PayloadFormat], str]


@dataclass(frozen=True)
class ExecutorSpec:
    """Static facts of an executor: readable without importing its kernels or owning its device.

    Attributes:
        name, path, summary: table key, "module:class", one line for `eprt explain`.
        formats: token formats it takes natively; an adapter bridges the other one.
        weights: number formats its kernels take natively.
        decodes: number formats it takes by decoding to bf16 when weights are loaded (more memory; `explain` says so).
        payloads: number formats of the tokens it takes, plain ones (`bf16`, `f32`) among them.
        devices, sm: device kinds; for CUDA the inclusive range of compute capabilities times ten.
        activations: kinds of `Activation` it computes.
        bias: expert biases are honoured.
        graph_safe: no host sync and static shapes for fixed N or M.
        requirement: package it needs, or None.
        invariant: device kinds on which it can keep `RuntimeConfig.batch_invariant`.
        rule: limits that no other field expresses (`eprt.experts.rules`), or None.
        preference: the largest comes first if there are no measured times.
        witness: it checks other executors and is slow: the plan takes it only by name.
        takes_logits: whether its kernels choose a layer's experts themselves (`Executor.run_logits`); None: never.
    """

    name: str
    path: str
    summary: str
    formats: tuple[TokenFormat, ...]
    weights: tuple[WeightFormat, ...]
    devices: tuple[str, ...]
    decodes: tuple[WeightFormat, ...] = ()
    payloads: tuple[PayloadFormat, ...] = ("bf16", "f32")
    sm: tuple[int, int] = (0, 999)
    activations: tuple[str, ...] = ("swiglu", "relu2")
    bias: bool = True
    graph_safe: bool = False
    invariant: tuple[str, ...] = ()
    requirement: Requirement | None = None
    rule: Rule | None = None
    takes_logits: Callable[[MoEConfig], bool] | None = None
    preference: int = 0
    witness: bool = False

    def supports(
        self,
        config: MoEConfig,
        parallel: ParallelConfig,
        runtime: RuntimeConfig,
        device: Device,
        payload: PayloadFormat,
    ) -> Support:
        """Says whether this executor can compute that layer there; needs no tensors, no GPU, no package (unless
        `device.installed`)."""
        known = (*self.weights, *self.decodes)
        activation = config.activation
        refusals = [
            (device.kind not in self.devices, f"runs on {', '.join(self.devices)}, not on {device}"),
            (
                device.kind == "cuda" and not self.sm[0] <= device.sm <= self.sm[1],
                f"needs sm{self.sm[0]}"
                + (f" to sm{self.sm[1]}" if self.sm[1] < 999 else " or later")
                + f", not {device}",
            ),
            (config.weight_format not in known, f"takes {', '.join(known)} weights, not {config.weight_format}"),
            (payload not in self.payloads, f"takes {', '.join(self.payloads)} tokens, not {payload}"),
            (activation.kind not in self.activations, f"computes {', '.join(self.activations)}, not {activation.kind}"),
            (config.bias and not self.bias, "has no expert biases"),
            (runtime.batch_invariant and device.kind not in self.invariant, "batch_invariant: sums follow the batch"),
        ]
        for failed, reason in refusals:
            if failed:
                return refuse(reason)
        if self.rule is not None and (reason := self.rule(config, device, payload)):
            return refuse(reason)
        if device.installed and self.requirement is not None and not (found := self.requirement.check()):
            return found
        decoded = config.weight_format not in self.weights
        return Support(True, f"decodes {config.weight_format} to bf16 at load" if decoded else "")


def anytime(what: str) -> None:
    """Lets `what` be compiled: for executors outside of a World."""


class Executor(ABC):
    """The local experts' function, as a layer calls it.

    Attributes:
        spec: its row of the table; an adapter has one of its own.
        config: the layer's maths.
        strided: takes expert-major rows that lie further apart than H; else valid rows are copied, and so is what it
            writes.
    """

    spec: ExecutorSpec
    config: MoEConfig
    strided: ClassVar[bool] = False

    @abstractmethod
    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        """A call without its checks, of at least one row: write into `out` what `__call__` returns."""

    def __call__(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the experts.

        Args:
            tokens: as a dispatcher emitted them.
            out: where to write: [N, H] or [L, M, H] in the tokens' plain dtype (bf16 for packed payloads). Allocated
                if None.

        Returns:
            FlatTokens: [N, H]. ExpertMajorTokens: [L, M, H]. Zero rows: returned without a launch.
        """
        hidden = tokens.hidden
        shape = (*hidden.data.shape[:-1], hidden.hidden_size)
        if shape[-1] != self.config.hidden_size:
            raise InputError(f"tokens have hidden size {shape[-1]}: the experts have {self.config.hidden_size}")
        dtype = torch.float32 if hidden.format == "f32" else torch.bfloat16
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=hidden.data.device)
        elif tuple(out.shape) != shape or out.dtype != dtype:
            raise InputError(f"out is {tuple(out.shape)} {out.dtype}: expected {shape} {dtype}")
        if out.numel():
            self.run(tokens, out)
        return out

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Compiles and tunes all that a call can need. Called by every rank inside `World.warmup()`.

        Args:
            max_rows: most rows to come: N of FlatTokens, M of ExpertMajorTokens.
            top_k: K of the FlatTokens to come, where a dispatcher pads the model's; None: the model's top-k.
        """

    def start_compiling(self, max_rows: int, top_k: int | None = None) -> None:
        """Starts to compile in other processes what `warmup` with the same arguments needs. Default: nothing."""

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        """Returns what was prepared from the weights, slot by slot: what takes an expert from one slot to another.

        Returns:
            tensors [L, ...], contiguous, equal in name, dtype and shape on all ranks of one moe_tp_rank: views of the
            memory that calls read, so what is written to them counts from the next call on, in captured graphs, too.

        Raises:
            UnsupportedError: this executor's layout isn't one of whole experts, or nobody has shown that it is.
        """
        raise UnsupportedError(
            f"{self.spec.name} can't move experts: its layout isn't known to be divided by expert; use another "
            "executor, or load the model again with the new placement"
        )

    def load_experts(self, weights: ExpertWeights, slots: Sequence[int] | None = None) -> None:
        """Prepares new weights and writes them into the tensors that calls read: they count from the next call on, in
        captured graphs, too. Where it fails, experts may hold old and new values.

        Args:
            weights: canonical; not kept. Of the whole shard, or one expert for each of `slots`.
            slots: local slots to write; None: all.

        Raises:
            ConfigError: weights of other sizes or formats, or values that need another layout than the first ones.
            UnsupportedError: see `require_loadable`.
        """
        self.require_loadable(single=slots is not None)

    def require_loadable(self, *, single: bool) -> None:
        """Raises UnsupportedError where this executor can't replace its weights, or not `single` experts."""
        raise UnsupportedError(f"{self.spec.name} can't replace its weights: build the layer again")

    @property
    def takes_logits(self) -> bool:
        """Says whether `run_logits` can be called for this layer."""
        rule = self.spec.takes_logits
        return rule is not None and rule(self.config)

    def run_logits(self, hidden: Payload, logits: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Let the kernel choose the experts: for rows that every rank of the layer holds, with no dispatch before it.

        Args:
            hidden: [N, H], as in FlatTokens.
            logits: [N, E] bf16 or float32, over all E experts; the local ones are computed.
            bias: [E] correction bias of `grouped_sigmoid`; other methods have none.

        Returns:
            [N, H] bf16: this rank's share of the weighted sum, routed scaling applied.

        Raises:
            ConfigError: a routing method that the kernels don't have.
            InputError: logits of another shape.
        """
        raise ConfigError(f"{self.spec.name} takes no router logits: use eprt.routing.route and dispatch")


class PreparedExecutor(Executor):
    """An executor with weights of its own, laid out for its kernels.

    Args:
        config: the layer's maths.
        shard: which experts, which slice of each.
        weights: canonical weights of that shard, on any device; not kept after construction.
        device: where to compute.
        runtime: determinism, precision.
        require_cold: asked before anything is compiled by a call; raises UsageError after `World.warmup`.

    Attributes:
        pattern: the executor whose layout `_prepare` is to keep, while `load_experts` makes one like it; else None.

    Raises:
        ConfigError: weights aren't what config and shard say.
    """

    pattern: PreparedExecutor | None = None

    def __init__(
        self,
        config: MoEConfig,
        shard: ExpertShard,
        weights: ExpertWeights,
        device: torch.device,
        runtime: RuntimeConfig,
        require_cold: Callable[[str], None] = anytime,
    ) -> None:
        weights.check(config, shard)
        self.config = config
        self.shard = shard
        self.device = device
        self.runtime = runtime
        self.require_cold = require_cold
        if shard.moe_tp_rank:  # the sum over MoE-TP ranks must hold the bias once
            weights = replace(weights, down_bias=None)
        self._prepare(weights.map(torch.Tensor.detach))  # a graph would keep a trainer's

    @abstractmethod
    def _prepare(self, weights: ExpertWeights) -> None:
        """Makes the kernel's layout on `self.device`, expert by expert. `weights` are checked; MoE-TP rank 0 alone has
        the `down_bias`."""

    def load_experts(self, weights: ExpertWeights, slots: Sequence[int] | None = None) -> None:
        shard = self.shard
        single = slots is not None
        chosen = range(shard.num_local_experts) if slots is None else slots
        weights.check(self.config, replace(shard, num_local_experts=len(chosen), experts=()) if single else shard)
        self.require_loadable(single=single)
        if by_slot(self):
            write_slots(self, weights, chosen)
        else:
            write_whole(self, weights)

    def require_loadable(self, *, single: bool) -> None:
        if single and not by_slot(self):
            raise UnsupportedError(
                f"{self.spec.name} lays out its experts together, so single ones can't be loaded: load all of this "
                "rank's at once"
            )

    def _try_flat(self, rows: int, choices: int, expert: int, payload: PayloadFormat | None = None) -> None:
        """Makes every kind of call with `rows` FlatTokens whose choices all name `expert`, so that it is compiled."""
        ids = torch.full((rows, choices), expert, dtype=torch.int32, device=self.device)
        weights = torch.ones(rows, choices, dtype=torch.float32, device=self.device)
        for dtype in (torch.bfloat16, torch.float32):
            hidden = torch.zeros(rows, self.config.hidden_size, dtype=dtype, device=self.device)
            given = Payload.plain(hidden) if payload is None else encode_payload(hidden, payload)
            for every_row in (True, False) if payload is None or dtype is torch.bfloat16 else ():  # encoded alike
                self(FlatTokens(given, ids, weights, self.shard.num_experts, every_row))

    def _even_tokens(self, rows: int, top_k: int | None) -> FlatTokens:
        """Returns bf16 zeros to warm up on. Top-k entries go round the experts; those beyond the model's hold none."""
        config, choices = self.config, top_k or self.config.top_k
        ids = torch.arange(rows * choices, device=self.device, dtype=torch.int32).view(rows, choices)
        ids %= config.num_experts
        ids[:, config.top_k :] = config.num_experts
        hidden = torch.zeros((rows, config.hidden_size), dtype=torch.bfloat16, device=self.device)
        weights = torch.ones(ids.shape, dtype=torch.float32, device=self.device)
        return FlatTokens(Payload.plain(hidden), ids, weights, config.num_experts)

    def _try_expert_major(self, rows: int, valid: int) -> None:
        """Makes every kind of call with [L, rows, H], of which `valid` rows per expert are there."""
        L, device = self.shard.num_local_experts, self.device
        counts = torch.full((L,), valid, dtype=torch.int32, device=device)
        for dtype in (torch.bfloat16, torch.float32):
            hidden = torch.zeros(L, rows, self.config.hidden_size, dtype=dtype, device=device)
            self(ExpertMajorTokens(Payload.plain(hidden), counts))

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        """Writes [N, H] into `out`: weights applied, summed over K. Every executor with "flat" in `spec.formats` has
        one."""
        raise unsupported_format(self.spec.name, "flat")

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        """Writes [L, M, H] into `out`: rows below the counts, no weights. Both are contiguous unless `strided`. Every
        executor with "expert_major" in `spec.formats` has one."""
        raise unsupported_format(self.spec.name, "expert_major")

    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        if isinstance(tokens, FlatTokens):
            self._flat(tokens, out)
        elif self.strided:
            self._expert_major(tokens, out)
        else:
            on_contiguous_rows(self._expert_major, tokens, out)


def on_contiguous_rows(
    compute: Callable[[ExpertMajorTokens, torch.Tensor], None], tokens: ExpertMajorTokens, out: torch.Tensor
) -> None:
    """`compute` on contiguous tokens, into a contiguous output; copies valid rows where they aren't."""
    data = expert_major.dense(tokens.hidden.data, tokens.counts)
    if data is not tokens.hidden.data:
        tokens = replace(tokens, hidden=replace(tokens.hidden, data=data))
    whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    compute(tokens, whole)
    if whole is not out:
        expert_major.copy_valid_rows(whole, out, tokens.counts)


def present(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Returns by name those that aren't None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def unsupported_format(executor: str, token_format: TokenFormat) -> ConfigError:
    """For an executor whose kernels take one token format only; the plan puts an adapter in front of it."""
    return ConfigError(f"{executor} has no native {token_format} path; build it through eprt.experts.make_executor")


class AdaptedExecutor(Executor):
    """Stands in front of an executor and takes both formats; graph-safe if the inner one is (no host sync).

    The format that the inner executor lacks costs a copy: FlatTokens become ExpertMajorTokens of N rows for each of the
    L local experts, ExpertMajorTokens become L * M flat rows of one top-k entry and weight 1.
    """

    def __init__(self, inner: PreparedExecutor) -> None:
        self.inner = inner
        self.config = inner.config
        self.shard = inner.shard
        self.native_formats = inner.spec.formats
        self.spec = replace(inner.spec, formats=("flat", "expert_major"), takes_logits=None)

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        return self.inner.slot_tensors()

    def load_experts(self, weights: ExpertWeights, slots: Sequence[int] | None = None) -> None:
        self.inner.load_experts(weights, slots)

    def require_loadable(self, *, single: bool) -> None:
        self.inner.require_loadable(single=single)

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Warms up for the format that the inner executor doesn't take, in the shape in which it is handed on."""
        if "flat" in self.native_formats:
            self.inner.warmup(max_rows * self.shard.num_local_experts, top_k=1)
        else:
            self.inner.warmup(max_rows)

    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        if ("flat" if isinstance(tokens, FlatTokens) else "expert_major") in self.native_formats:
            self.inner(tokens, out)
        elif isinstance(tokens, FlatTokens):
            # Without repeats in a row, no expert can get more than N rows.
            tokens = merge_repeats(tokens)
            laid_out, place = expert_major.expert_major_from_flat(tokens, self.shard, tokens.num_rows)
            out.copy_(expert_major.weighted_sum(self.inner(laid_out), place, tokens.weights))
        else:
            on_contiguous_rows(self._as_flat, tokens, out)

    def _as_flat(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        out.copy_(self.inner(expert_major.flat_from_expert_major(tokens, self.shard)).view_as(out))
