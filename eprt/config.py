"""Three configs say what a layer computes (`MoEConfig`), how ranks share it (`ParallelConfig`) and how to run it
(`RuntimeConfig`). They are frozen and validate themselves: an instance that exists is consistent.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal, get_args

from eprt.errors import ConfigError
from eprt.kinds import require_kinds

WeightFormat = Literal["f32", "bf16", "mxfp4", "nvfp4", "fp8_tensor", "fp8_block", "fp8_channel", "mxfp8", "int4"]
PayloadFormat = Literal["f32", "bf16", "fp8_block", "nvfp4"]
CombineFormat = Literal["fp8"]
TokenFormat = Literal["flat", "expert_major"]
ActivationKind = Literal["swiglu", "geglu", "relu2"]
OnRankLost = Literal["restart", "continue", "renormalize"]
Validation = Literal["cheap", "full"]
Phase = Literal["prefill", "decode"]
RoutingMethod = Literal[
    "softmax_topk",
    "topk_softmax",
    "topk_sigmoid",
    "grouped_sigmoid",
    "grouped_softmax",
    "sqrt_softplus",
    "sparsemixer",
    "hash",
]

# Far above any model or machine: whatever a hostile config makes us list or allocate stays small.
MAX_EXPERTS, MAX_RANKS, MAX_WIDTH = 65_536, 65_536, 1 << 20
MAX_TOKENS = 2**31 - 1  # of a rank in one call

# In group-limited routing a group counts as the sum of so many of its best scores.
GROUP_BEST = {"grouped_sigmoid": 2, "grouped_softmax": 1}


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def require_size(name: str, value: object, most: int = 2**63 - 1) -> None:
    """Raises ConfigError unless `value` is an integer from 1 to `most`."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
    _require(ok, f"{name} {value!r}: must be a positive integer")
    _require(isinstance(value, int) and value <= most, f"{name} {value}: expected at most {most}")


def _require_name(what: str, value: object, known: object) -> None:
    names = get_args(known)
    _require(value in names, f"{what} {value!r}: expected one of {', '.join(names)}")


@dataclass(frozen=True)
class Activation:
    """The function between the two matrices of an expert.

    `swiglu` (gated): `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`,
    `out = g * sigmoid(alpha * g) * (u + beta)`. gpt-oss: 1.702, 1, 7. DeepSeek-V4: 1, 0, 10.
    SiLU-gated models (Qwen, DeepSeek-V3): 1, 0, no limit.
    `geglu` (gated, Gemma 4): `out = gelu(gate) * up`, GELU by its tanh approximation.
    `relu2` (not gated, Nemotron-H): `out = relu(up) ** 2`.
    """

    kind: ActivationKind = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        _require_name("activation kind", self.kind, ActivationKind)
        require_kinds(Activation, vars(self))
        for name in ("alpha", "beta"):
            _require(math.isfinite(getattr(self, name)), f"activation {name} {getattr(self, name)}: must be finite")
        finite = self.limit is None or (self.limit > 0 and math.isfinite(self.limit))
        _require(finite, f"activation limit {self.limit}: must be positive and finite, or None")

    @cached_property
    def gated(self) -> bool:
        return self.kind != "relu2"

    @property
    def plain(self) -> bool:
        """Tells whether it is `silu(gate) * up`, or any `relu2`: alpha, beta and limit change nothing."""
        return not self.gated or (self.kind, self.alpha, self.beta, self.limit) == ("swiglu", 1.0, 0.0, None)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """Returns alpha, beta, limit (0: none) and c of the one formula of gated kinds: swiglu's, with
        `sigmoid(alpha * (g + c * g ** 3))`. GELU's tanh approximation has that form, as (1 + tanh(x)) / 2 is
        sigmoid(2 * x)."""
        if self.kind == "geglu":
            return math.sqrt(8 / math.pi), 0.0, 0.0, 0.044715
        return float(self.alpha), float(self.beta), float(self.limit or 0.0), 0.0

    @cached_property
    def parts(self) -> int:
        """Counts the halves of the first matrix: 2 (gate, up) or 1."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class Routing:
    """Describes how router logits become a TopK.

    Attributes:
        method: `softmax_topk` (Qwen, Mixtral), `topk_softmax` (gpt-oss, Granite), `topk_sigmoid` (Llama 4),
            `grouped_sigmoid` (DeepSeek-V3, GLM, MiniMax-M2, Nemotron-H), `grouped_softmax` (DeepSeek-V2, ERNIE 4.5),
            `sqrt_softplus` (DeepSeek-V4), `sparsemixer` (Phi-3.5-MoE, two experts a token), `hash` (DeepSeek-V4's first
            layers: ids from a token-id table).
        renormalize: divide the chosen weights by their sum (`topk_softmax` always sums to 1; `topk_sigmoid` and
            `sparsemixer` never do).
        num_groups, topk_groups: group-limited choice of `grouped_sigmoid` (a group counts as the sum of its two best
            scores) and `grouped_softmax` (as its best one).
        scaling_factor: routed scaling, applied to the weights here and nowhere else.
        jitter: of `sparsemixer`: logits further than twice this from the best, relative to the larger of both sizes,
            don't count in its softmax.
    """

    method: RoutingMethod = "softmax_topk"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _require_name("routing method", self.method, RoutingMethod)
        require_kinds(Routing, vars(self))
        _require(
            math.isfinite(self.jitter) and self.jitter >= 0, f"routing jitter {self.jitter}: must be finite, 0 or more"
        )
        _require(math.isfinite(self.scaling_factor), f"routing scaling_factor {self.scaling_factor}: must be finite")
        _require(
            1 <= self.topk_groups <= self.num_groups,
            f"topk_groups {self.topk_groups}: must lie between 1 and num_groups ({self.num_groups})",
        )


@dataclass(frozen=True)
class SharedExpert:
    """The dense expert every token visits, on local tokens. `gate`: scaled by `sigmoid(x @ gate_weight)`."""

    intermediate_size: int
    gate: bool = False
    activation: Activation = field(default_factory=Activation)

    def __post_init__(self) -> None:
        require_size("intermediate_size of the shared expert", self.intermediate_size, MAX_WIDTH)
        require_kinds(SharedExpert, vars(self))


@dataclass(frozen=True)
class MoEConfig:
    """The maths of one MoE layer; nothing about ranks or devices.

    Attributes:
        num_experts: E, over all ranks.
        top_k: K, experts a token visits.
        hidden_size: H, the width experts see (the latent width where `model_hidden_size` is set).
        intermediate_size: I, of one expert, before any sharding.
        activation, routing: what comes between an expert's two matrices, and how a token's experts are chosen.
        shared: the dense expert beside the routed ones, or None.
        model_hidden_size: the model's own width if the experts live in a latent dimension (Nemotron-H), else None.
        bias: both expert matrices carry a bias (gpt-oss).
        weight_on_input: the router's weight multiplies the expert's input, not its output (Llama 4). top_k must be 1.
        weight_format: the number format of the expert matrices in the checkpoint.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = field(default_factory=Activation)
    routing: Routing = field(default_factory=Routing)
    bias: bool = False
    weight_format: WeightFormat = "bf16"
    shared: SharedExpert | None = None
    model_hidden_size: int | None = None
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k"):
            require_size(name, getattr(self, name), MAX_EXPERTS)
        for name in ("hidden_size", "intermediate_size"):
            require_size(name, getattr(self, name), MAX_WIDTH)
        if self.model_hidden_size is not None:
            require_size("model_hidden_size", self.model_hidden_size, MAX_WIDTH)
        require_kinds(MoEConfig, vars(self))
        E, K, groups, usable = self.num_experts, self.top_k, self.routing.num_groups, self.routing.topk_groups
        _require(K <= E, f"top_k {K} is larger than num_experts {E}: a token visits distinct experts")
        _require(
            not self.weight_on_input or K == 1,
            f"top_k {K} with weight_on_input: must be 1, a token travels once, with one input",
        )
        _require(self.routing.method != "sparsemixer" or K == 2, f"top_k {K} with sparsemixer routing: must be 2")
        _require(E % groups == 0, f"num_experts {E} can't be split into {groups} routing groups")
        reachable = E // groups * usable
        _require(
            reachable >= K,
            f"top_k {K} is larger than the {reachable} experts of the {usable} routing groups a token may use",
        )

    @property
    def gate_up_rows(self) -> int:
        return self.activation.parts * self.intermediate_size

    @cached_property
    def input_size(self) -> int:
        """Width of the layer's input and output: the model's hidden size."""
        return self.model_hidden_size or self.hidden_size

    def settings(self) -> dict[str, str]:
        """Returns every value as text by dotted name, for the ranks to compare: `routing.scaling_factor` -> "2.5"."""
        found: dict[str, str] = {}
        for name, value in asdict(self).items():
            inner: dict[str, object] = value if isinstance(value, dict) else {"": value}
            found |= {f"{name}.{key}".rstrip("."): str(item) for key, item in inner.items()}
        return found


@dataclass(frozen=True)
class ParallelConfig:
    """Describes how `world_size` ranks are shared: DP x attention-TP before the layer, EP x MoE-TP inside it.

    Rank r is `dp_rank * attention_tp_size + attention_tp_rank` and also `ep_rank * moe_tp_size + moe_tp_rank`.

    Attributes:
        ranks_per_host: the fewest ranks that share a host; None: all of them are on one. A World finds it out.
    """

    world_size: int = 1
    attention_tp_size: int = 1
    moe_tp_size: int = 1
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "attention_tp_size", "moe_tp_size"):
            require_size(name, getattr(self, name), MAX_RANKS)
        if self.ranks_per_host is not None:
            require_size("ranks_per_host", self.ranks_per_host)
        for name in ("attention_tp_size", "moe_tp_size"):
            value = getattr(self, name)
            _require(
                self.world_size % value == 0,
                f"{name} {value} doesn't divide world_size {self.world_size}; use a divisor",
            )

    @property
    def ep_size(self) -> int:
        return self.world_size // self.moe_tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.attention_tp_size

    @property
    def spans_hosts(self) -> bool:
        return self.ranks_per_host is not None and self.ranks_per_host < self.world_size


@dataclass(frozen=True)
class RuntimeConfig:
    """Says how to run the layer; nothing here changes its maths beyond the stated precisions.

    Attributes:
        dispatcher, executor: a name from their tables, or "auto" (`eprt explain` shows the choice).
        max_tokens_per_rank: capacity; all buffers are sized by it. A larger batch is split into rounds of at most this
            many tokens a rank; all ranks make the same number of rounds.
        strict_capacity: raise CapacityError for a larger batch, on every rank, instead of rounds.
        payload: number format in which tokens are sent to the experts; None keeps their own. `nvfp4` takes the
            checkpoint's calibrated `input_scale` (the largest of all ranks) as its second-level scale, or 1 if it has
            none.
        combine_payload: number format in which the experts' outputs are sent back; None keeps the tokens' own. `fp8`,
            an explicit accuracy trade, casts them to E4M3 without a scale. Between 2^-6 and 448 rounding changes a
            number by at most 2^-4 of itself, 2% to 3% in norm. Larger numbers and infinity become 448. Below 2^-6 the
            steps are 2^-9, so numbers under 2^-10 become 0. Use it only for outputs known to lie in that range.
        on_rank_lost: "restart": the remaining ranks raise RankLost and end, so that the launcher starts them again.
            "continue": `World.shrink` can go on without ranks that are lost or that leave on purpose; outputs then lack
            the part of their experts. "renormalize": the same, but a token's other weights are scaled to the sum that
            all of them had. The plan excludes dispatchers that can't, and says which can only between two steps.
        token_format: force the format between dispatcher and executor; None lets the plan choose.
        validate: "cheap" checks what the host knows without a device sync; "full" also checks values (ids in range,
            finite weights) and compares all ranks' headers before payload moves. gloo worlds always compare headers.
        phase: the batch size that "auto" chooses for: `decode` is up to 128 tokens a rank, `prefill` is
            max_tokens_per_rank. It also sets how replicas of an expert share its tokens: in `decode` one of them takes
            all, in `prefill` each in turn.
        deterministic: ask executors for sums that are identical from run to run. Those of `humming` then don't depend
            on the rest of the batch either.
        batch_invariant: a token's experts give the same bits whatever else is in the batch, on any rank, in graphs or
            not. The plan excludes backends that can't, and replicated experts. Routers, shared experts and latent
            projections are not covered.
        count_load: count on the device how often each expert is chosen, for `ExpertParallelMoE.load`.
        low_precision_activations: let an executor quantise activations to FP8 (an explicit accuracy trade): experts'
            error against float32 is then 4% to 5% in norm instead of 0.3%, with FP8 weights and with MXFP4.
        layer_graphs: `World.warmup` captures each layer's call in CUDA graphs for small R; eager callers then replay
            them. This is for models whose attention can't be captured. Calls without a known R, or with the caller's
            own routing or token ids, run eagerly. `eprt.StepGraphs` captures more and is faster. None: only in models
            given to `parallelize`, on several GPUs, if dispatcher and executor can be captured.
    """

    dispatcher: str = "auto"
    executor: str = "auto"
    max_tokens_per_rank: int = 4096
    strict_capacity: bool = False
    payload: PayloadFormat | None = None
    combine_payload: CombineFormat | None = None
    on_rank_lost: OnRankLost = "restart"
    token_format: TokenFormat | None = None
    validate: Validation = "cheap"
    phase: Phase = "decode"
    deterministic: bool = False
    batch_invariant: bool = False
    low_precision_activations: bool = False
    layer_graphs: bool | None = None
    count_load: bool = False

    def __post_init__(self) -> None:
        for name in ("dispatcher", "executor"):
            found: object = getattr(self, name)
            _require(isinstance(found, str), f"{name} {found!r}: expected a name from its table, or 'auto'")
        require_size("max_tokens_per_rank", self.max_tokens_per_rank, MAX_TOKENS)
        require_kinds(RuntimeConfig, vars(self))

    @property
    def may_leave_out(self) -> bool:
        """Tells whether ranks may leave on purpose, or be left out once they are lost."""
        return self.on_rank_lost != "restart"
