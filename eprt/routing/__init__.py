"""Routes tokens: turns router logits into TopK, by one implementation for every model family.

The formulas are those of the models' own code (transformers: `GptOssTopKRouter`, `Qwen3MoeTopKRouter`,
`DeepseekV3TopkRouter`, `DeepseekV4TopKRouter`, `DeepseekV4HashRouter`, `NemotronHTopkRouter`, `DeepseekV2TopkRouter`,
`Ernie4_5_MoeTopKRouter`, `Llama4Router`, phimoe's `sparsemixer`), rounding included: each works in the dtype its model
works in, so the choice of experts is the model's own, ties aside.

On CUDA the work is done by the kernels of `kernels.py`, elsewhere, and for what those don't know, by the plain
torch of `formulas.py`, which is also what the kernels are tested against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from eprt.config import GROUP_BEST, MoEConfig, Routing
from eprt.errors import ConfigError, InputError
from eprt.kinds import require_kinds
from eprt.routing.formulas import route_torch
from eprt.tokens import RouterLogits, TopK

if TYPE_CHECKING:
    from eprt.routing.launch import FusedRouter

WeightRounding = Literal["logits", "float32", "tokens"]
BIASED = ("grouped_sigmoid", "grouped_softmax", "sqrt_softplus")  # methods whose choice takes a correction bias


def route(
    logits: torch.Tensor | RouterLogits,
    routing: Routing,
    top_k: int,
    *,
    correction_bias: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    token_table: torch.Tensor | None = None,
) -> TopK:
    """Chooses `top_k` experts per token. T = 0 is ordinary input.

    On CUDA there is no host sync, and of equal scores the lower expert wins (elsewhere as `torch.topk` leaves them).

    Args:
        logits: [T, E], any float dtype: `F.linear(hidden, router.weight, router.bias)`.
        correction_bias: [E], added to the scores for the choice alone (`grouped_sigmoid`, `grouped_softmax`,
            `sqrt_softplus`).
        token_ids: [T] integer vocabulary ids (`hash`).
        token_table: [V, K] integer expert ids of each vocabulary id (`hash`).

    Returns:
        TopK: ids [T, K] int32, weights [T, K] float32 with `routing.scaling_factor` applied.

    Raises:
        ConfigError: top_k outside [1, E], groups that can't hold top_k experts, `sparsemixer` without top_k 2.
        InputError: a missing or wrongly shaped tensor; on CPU, a token id outside the table (a CUDA kernel asserts
            on that by itself, since reading the ids here would synchronise).
    """
    values = logits.logits if isinstance(logits, RouterLogits) else logits
    if values.dim() != 2 or not values.is_floating_point():
        raise InputError(f"router logits are {tuple(values.shape)} {values.dtype}: expected a float [T, E]")
    check_choice(routing, top_k, values.shape[1], correction_bias)
    if routing.method == "hash":
        _check_table(values.shape[0], top_k, token_ids, token_table)
    given = correction_bias, token_ids, token_table
    if values.is_cuda:
        from eprt.routing import launch as routing_launch

        dtypes = [values.dtype, None if correction_bias is None else correction_bias.dtype]
        if routing_launch.knows(routing, top_k, values.shape[1], *dtypes):
            return routing_launch.choose(values, routing, top_k, *given)
    return route_torch(values, routing, top_k, *given)


def check_choice(routing: Routing, top_k: int, num_experts: int, correction_bias: torch.Tensor | None) -> None:
    """Checks what doesn't change from call to call. Raises as `route`."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k {top_k}: must lie between 1 and the {num_experts} experts that have logits")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise InputError(f"correction_bias is {tuple(correction_bias.shape)}: expected ({num_experts},)")
    if routing.method == "sparsemixer" and top_k != 2:
        raise ConfigError(f"top_k {top_k} with sparsemixer routing: must be 2")
    count = GROUP_BEST.get(routing.method)
    if count is None or routing.num_groups == 1:
        return
    size, remainder = divmod(num_experts, routing.num_groups)
    if remainder or size < count:
        raise ConfigError(
            f"{num_experts} experts in {routing.num_groups} groups: groups need an equal size of {count} or more"
        )
    if top_k > size * routing.topk_groups:
        raise ConfigError(f"top_k {top_k} is larger than the {size * routing.topk_groups} experts of the chosen groups")


def _check_table(num_tokens: int, top_k: int, token_ids: torch.Tensor | None, token_table: torch.Tensor | None) -> None:
    if token_ids is None or token_table is None:
        missing = "token_ids" if token_ids is None else "token_table"
        raise InputError(f"hash routing needs {missing}: pass the vocabulary ids of the T tokens and the table [V, K]")
    if token_table.dim() != 2 or token_table.shape[1] != top_k or token_table.is_floating_point():
        raise InputError(
            f"token_table is {tuple(token_table.shape)} {token_table.dtype}: expected an integer [V, {top_k}]"
        )
    if token_ids.shape != (num_tokens,) or token_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"token_ids is {tuple(token_ids.shape)} {token_ids.dtype}: expected ({num_tokens},) int32 or int64"
        )
    if token_ids.device.type == "cpu" and token_ids.numel():
        low, high = (int(v) for v in torch.aminmax(token_ids))
        if low < 0 or high >= token_table.shape[0]:
            raise InputError(f"token_ids span [{low}, {high}]: the hash table has rows [0, {token_table.shape[0]})")


def _check_padding(padding: torch.Tensor, hidden: torch.Tensor) -> None:
    T = hidden.shape[0]
    one = padding.ndim == 1 and padding.shape[0] >= T and padding.dtype == torch.bool and padding.is_contiguous()
    if not one or padding.device != hidden.device:
        raise InputError(
            f"padding is {tuple(padding.shape)}, strides {padding.stride()}, {padding.dtype} on {padding.device}: "
            f"expected a contiguous bool [{T} or more] on {hidden.device}, True for each token that nobody reads"
        )


class Router(nn.Module):
    """One layer's router: computes the logits and chooses experts.

    Args:
        weight: [E, H] of the model's hidden size (not the latent one).
        routing, top_k: as in MoEConfig.
        bias: [E], added to the logits (gpt-oss), or None.
        correction_bias: [E], see `route`, or None.
        token_table: [V, K] integers, see `route`, or None.
        float32_logits: multiply in float32 whatever the dtypes. None: as the model of that method does, which is
            float32 for `grouped_sigmoid` and `grouped_softmax` and the model's dtype for the others.
        weights: what the routing weights are rounded to: `logits` as the method does on logits of this dtype (Qwen),
            `float32` not at all (Mixtral), `tokens` the dtype of the hidden states whatever the logits' (ERNIE 4.5).
        padding: calls may mark tokens that nobody reads; a warm-up compiles what they need.

    Raises:
        ConfigError: what doesn't fit each other: shapes, a bias or a table and the method, a table and the experts.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    token_table: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor,
        routing: Routing,
        top_k: int,
        *,
        bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        token_table: torch.Tensor | None = None,
        float32_logits: bool | None = None,
        weights: WeightRounding = "logits",
        padding: bool = False,
    ) -> None:
        require_kinds(Router.__init__, locals())
        super().__init__()
        self.routing, self.top_k, self.padding = routing, top_k, padding
        in_float32 = routing.method in ("grouped_sigmoid", "grouped_softmax")
        self.float32_logits = in_float32 if float32_logits is None else float32_logits
        self.weights: WeightRounding = weights
        tensors = {"weight": weight, "bias": bias, "correction_bias": correction_bias, "token_table": token_table}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._check_tensors()
        self._fused: tuple[list[tuple[str, torch.Tensor | None, int]], FusedRouter | None] = ([], None)

    def _check_tensors(self) -> None:
        weight, method = self.weight, self.routing.method
        if weight.dim() != 2:
            raise ConfigError(f"router weight is {tuple(weight.shape)}: expected [E, H]")
        for name, tensor in (("bias", self.bias), ("correction_bias", self.correction_bias)):
            if tensor is not None and tensor.shape != weight.shape[:1]:
                raise ConfigError(f"router {name} is {tuple(tensor.shape)}: expected ({weight.shape[0]},)")
        if (method == "hash") != (self.token_table is not None):
            wrong = "needs a token_table [V, K]" if self.token_table is None else "takes no token_table"
            raise ConfigError(f"routing method {method!r} {wrong}")
        if self.correction_bias is not None and method not in BIASED:
            raise ConfigError(f"routing method {method!r} takes no correction_bias: {', '.join(BIASED)} do")
        check_choice(self.routing, self.top_k, weight.shape[0], self.correction_bias)
        if (table := self.token_table) is None:
            return
        if table.dim() != 2 or table.shape[1] != self.top_k or table.is_floating_point() or table.is_complex():
            shape = tuple(table.shape)
            raise ConfigError(f"token_table is {shape} {table.dtype}: expected an integer [V, {self.top_k}]")
        low, high = (0, 0) if table.is_meta or not table.numel() else (int(v) for v in torch.aminmax(table))
        if low < 0 or high >= weight.shape[0]:
            raise ConfigError(f"token_table holds experts {low} to {high}: expected 0 to {weight.shape[0] - 1}")

    def logits(self, hidden: torch.Tensor) -> RouterLogits:
        """Returns RouterLogits [T, E] of hidden states [..., H]. Raises InputError on a wrong width or dtype."""
        hidden = self._rows(hidden)
        fused = self._kernels(hidden)
        return self.logits_by_torch(hidden) if fused is None else RouterLogits(fused.logits(hidden))

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> TopK:
        """Returns the TopK of hidden states [..., H] (`hash`: with their vocabulary ids [...]). Those of the T tokens
        that `padding` [T or more] bool marks get E for an id: no expert. Raises as `route`."""
        hidden = self._rows(hidden)
        if padding is not None:
            _check_padding(padding, hidden)
        token_ids = None if token_ids is None else token_ids.reshape(-1)
        fused = self._kernels(hidden)
        if fused is not None and (token_ids is None or token_ids.device == hidden.device):
            if self.routing.method == "hash":
                _check_table(hidden.shape[0], self.top_k, token_ids, self.token_table)
            return fused.topk(hidden, token_ids, padding)
        given = {"correction_bias": self.correction_bias, "token_ids": token_ids, "token_table": self.token_table}
        chosen = route(self.logits_by_torch(hidden), self.routing, self.top_k, **given)
        ids, weights = chosen.ids, chosen.weights
        if padding is not None:
            ids = ids.masked_fill(padding[: ids.shape[0], None], self.weight.shape[0])
        return TopK(ids, weights.to(hidden.dtype).float() if self.weights == "tokens" else weights)

    def warmup(self, max_tokens: int, *, logits: bool = False) -> None:
        """Compiles what up to `max_tokens` bf16 hidden states need, `logits` too if asked for. CPU: nothing."""
        if (fused := self.kernels) is not None:
            fused.warmup(max_tokens, logits=logits, padding=self.padding)

    @property
    def kernels(self) -> FusedRouter | None:
        """Returns what routes bf16 hidden states [T, H] on the weight's device for now, without a look at whether the
        weight is still the same; None where torch does."""
        weight = self.weight
        return self._kernels(torch.empty(0, weight.shape[1], dtype=torch.bfloat16, device=weight.device))

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._buffers["weight"]  # as the attribute, without a search for it
        width = 0 if weight is None else weight.shape[1]
        if hidden.shape[-1] != width:
            raise InputError(f"hidden is {tuple(hidden.shape)}: the router's weight is {tuple(self.weight.shape)}")
        return hidden if hidden.dim() == 2 else hidden.reshape(-1, width)

    def _kernels(self, hidden: torch.Tensor) -> FusedRouter | None:
        """Returns the compiled kernels for these hidden states, None where torch does the work."""
        if not hidden.is_cuda or hidden.dtype != torch.bfloat16:
            return None
        made_of, fused = self._fused
        buffers = self._buffers
        same = len(made_of) == len(buffers)
        # Also after `.to()`, `load_state_dict` or a change in place: what is copied from a tensor would be stale.
        for name, tensor, version in made_of:
            now = buffers.get(name)
            same = same and tensor is now and (now is None or version == _version(now))
        if not same:
            fused = self._renewed()
        return fused if fused is not None and fused.device == hidden.device else None

    def refresh(self) -> None:
        """Brings a change in place to what CUDA graphs of the kernels read: they may hold a copy of a tensor. Each of
        `StepGraphs` and `layer_graphs` asks its layers' routers to before a replay."""
        made_of, fused = self._fused
        if fused is None or not fused.copies:
            return
        if any(now is not None and version != _version(now) for _, now, version in made_of):
            self._renewed()

    def _renewed(self) -> FusedRouter | None:
        """Returns kernels of the tensors as they are now: those of before, if only values have changed."""
        made_of, fused = self._fused
        kept = len(made_of) == len(self._buffers) and all(self._buffers.get(name) is now for name, now, _ in made_of)
        if fused is not None and kept:
            fused.reread(self.weight, self.bias, self.correction_bias, self.token_table)
        else:
            fused = self._make_kernels()
        self._fused = [(name, now, 0 if now is None else _version(now)) for name, now in self._buffers.items()], fused
        return fused

    def _make_kernels(self) -> FusedRouter | None:
        weight, bias, correction = self.weight, self.bias, self.correction_bias
        if not weight.is_cuda:
            return None
        from eprt.routing.launch import FusedRouter, Rounding, knows

        check_choice(self.routing, self.top_k, weight.shape[0], correction)
        fits = weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and self.float32_logits)
        dtypes = [None if tensor is None else tensor.dtype for tensor in (bias, correction)]
        if not fits or not knows(self.routing, self.top_k, weight.shape[0], *dtypes):
            return None
        logits = torch.float32 if self.float32_logits else weight.dtype
        method = torch.float32 if self.weights == "float32" else logits
        rounding = Rounding(logits, method, torch.bfloat16 if self.weights == "tokens" else torch.float32)
        return FusedRouter(weight, self.routing, self.top_k, rounding, bias, correction, self.token_table)

    def check(self, config: MoEConfig) -> None:
        """Raises ConfigError unless it chooses among this layer's experts, and as the config says."""
        for name, tensor in self.named_buffers():
            if tensor.is_meta:
                raise ConfigError(
                    f"router {name} is on the meta device, which holds no numbers: load the weights first"
                )
        found = (*self.weight.shape, self.top_k)
        expected = (config.num_experts, config.input_size, config.top_k)
        if found != expected:
            raise ConfigError(f"the router has (experts, hidden, top_k) {found}: the config says {expected}")
        if self.routing != config.routing:
            raise ConfigError(f"the router has {self.routing}: the config says {config.routing}; build both from one")

    def logits_by_torch(self, hidden: torch.Tensor) -> RouterLogits:
        """Returns the `logits` of [T, H] by torch alone, on any device."""
        weight, bias = self.weight, self.bias
        if self.float32_logits:
            hidden, weight = hidden.float(), weight.float()
        elif hidden.dtype != weight.dtype:
            raise InputError(f"hidden is {hidden.dtype}, the router {weight.dtype}: use router.to(hidden.dtype)")
        logits = F.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))
        return RouterLogits(logits.float() if self.weights == "float32" else logits)


def _version(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was written in place; inference tensors don't count that."""
    return 0 if tensor.is_inference() else tensor._version


def warmup(config: MoEConfig, router: Router | None, max_tokens: int, device: torch.device, *, logits: bool) -> None:
    """Compiles what a layer's routing of up to `max_tokens` tokens needs: its router's calls, `Router.logits` too if
    asked for, and `route` of bf16 and float32 logits. CPU: nothing."""
    if device.type != "cuda":
        return
    correction = table = None
    if router is not None:
        router.warmup(max_tokens, logits=logits)
        correction, table = router.correction_bias, router.token_table
    if config.routing.method == "hash" and table is None:
        return
    for dtype in (torch.bfloat16, torch.float32):
        for ids in (torch.int64, torch.int32) if table is not None else (torch.int64,):
            route(
                torch.zeros(1, config.num_experts, dtype=dtype, device=device),
                config.routing,
                config.top_k,
                correction_bias=correction,
                token_ids=torch.zeros(1, dtype=ids, device=device),
                token_table=table,
            )
