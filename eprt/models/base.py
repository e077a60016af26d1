"""A model family: which layers are mixtures of experts, their maths, and the names of their tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from eprt.config import Activation, MoEConfig, Routing, SharedExpert
from eprt.errors import CheckpointError, ConfigError
from eprt.json_files import shown
from eprt.models.checkpoint import Checkpoint
from eprt.models.fields import Part
from eprt.models.formats import ExpertNames, load_experts, load_linear, require_whole_blocks
from eprt.models.hf_config import expect, flatten, integer, model_dtype, num_layers, where
from eprt.models.schemes import scheme_of
from eprt.models.shards import require_finite
from eprt.placement import ExpertShard
from eprt.routing import Router, WeightRounding
from eprt.weights import PLAIN, ExpertWeights, LatentWeights, SharedExpertWeights


class ModelFamily(ABC):
    """One model family. Instances hold no state: class attributes name tensors, methods read a config or a checkpoint.

    Methods raise ConfigError about the config and CheckpointError about the tensors.

    Attributes:
        module: dotted path, in the transformers model, of the module an integration replaces; `{}` is the layer.
        blocks: the same module as checkpoints name it; the first name that a checkpoint uses is taken.
        routers: names of the router inside the block; the first that a checkpoint uses is taken.
        correction_biases: names of its selection bias inside the block, [E] or [1, E]; none if the family has none.
        float32_logits, router_weights: see `Router`; float32_router: its weight stays float32 where the model's dtype
            would round it, as in transformers 5.24.
        shared: name of the shared expert inside the block.
        aliases, stacked, transposed: see `formats.ExpertNames`.
        returns_scores: whether that module returns (hidden_states, router_scores); an integration returns no scores.
    """

    module: ClassVar[str] = "model.layers.{}.mlp"
    blocks: ClassVar[tuple[str, ...]] = ("model.layers.{}.mlp",)
    routers: ClassVar[tuple[str, ...]] = ("gate",)
    correction_biases: ClassVar[tuple[str, ...]] = ()
    float32_logits: ClassVar[bool | None] = None
    float32_router: ClassVar[bool] = False
    router_weights: ClassVar[WeightRounding] = "logits"
    shared: ClassVar[str] = "shared_experts"
    returns_scores: ClassVar[bool] = False
    aliases: ClassVar[dict[Part, tuple[str, ...]]] = {
        "gate": ("gate_proj", "w1"),
        "up": ("up_proj", "w3"),
        "down": ("down_proj", "w2"),
    }
    stacked: ClassVar[dict[Part, tuple[str, int, int]]] = {
        "gate": ("gate_up_proj", 0, 2),
        "up": ("gate_up_proj", 1, 2),
        "down": ("down_proj", 0, 1),
    }

    transposed: ClassVar[bool] = False

    @abstractmethod
    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        """Returns the numbers of the layers that are mixtures of experts."""

    @abstractmethod
    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        """Returns the maths of one of these layers."""

    def text_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of the text model. A family whose config nests them flattens it."""
        return hf

    def module_path(self, layer: int) -> str:
        """Returns the dotted path of the module that an integration replaces, e.g. `model.layers.3.mlp`."""
        return self.module.format(layer)

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        """Reads this rank's experts, and no other bytes, into canonical order."""
        names = self.expert_names(checkpoint, self.block(checkpoint, layer))
        scheme = scheme_of(self.text_config(checkpoint.config), self.expert_modules(layer), config.num_experts)
        return load_experts(checkpoint, names, config, shard, scheme)

    def require_whole_blocks(self, hf: dict[str, Any], layer: int, moe_tp_size: int) -> None:
        """Raises ConfigError where `load_experts` would, as blocks that share a scale would be cut. A family that reads
        experts by itself isn't asked (gpt-oss: loaders of vLLM and SGLang cut it beside blocks, and pad)."""
        if type(self).load_experts is not ModelFamily.load_experts:
            return
        scheme = scheme_of(self.text_config(hf), self.expert_modules(layer))
        require_whole_blocks(scheme, self.moe_config(hf, layer), moe_tp_size, where(hf))

    def expert_names(self, checkpoint: Checkpoint, block: str) -> ExpertNames:
        """Returns the names of the experts' tensors in this block of the checkpoint."""
        return ExpertNames(f"{block}.experts", self.aliases, self.stacked, self.transposed)

    def load_router(self, checkpoint: Checkpoint, layer: int, config: MoEConfig) -> Router:
        """Reads the router in the model's dtype, its selection bias in float32, as transformers keeps them."""
        block, prefix = self._names(checkpoint, layer)
        dtype = model_dtype(self.text_config(checkpoint.config))
        E = config.num_experts
        exact = torch.float32 if self.float32_router else dtype
        weight = _read_as(checkpoint, exact, f"{prefix}.weight", (E, config.input_size))
        if (rounded := weight.to(dtype)).eq(weight).all():
            weight = rounded
        bias = _read_as(checkpoint, dtype, f"{prefix}.bias", (E,)) if config.bias else None
        return Router(
            weight,
            config.routing,
            config.top_k,
            bias=bias,
            correction_bias=self._correction_bias(checkpoint, block, config),
            token_table=self._token_table(checkpoint, prefix, config),
            float32_logits=self.float32_logits,
            weights=self.router_weights,
        )

    def load_shared(self, checkpoint: Checkpoint, layer: int, config: MoEConfig) -> SharedExpertWeights | None:
        """Reads the whole shared expert in the model's dtype. Returns None if the layer has none."""
        shared = config.shared
        if shared is None:
            return None
        prefix = f"{self.block(checkpoint, layer)}.{self.shared}"
        H, I = config.input_size, shared.intermediate_size

        def linear(part: Part, rows: int, cols: int) -> torch.Tensor:
            return load_linear(checkpoint, tuple(f"{prefix}.{alias}" for alias in self.aliases[part]), rows, cols)

        return SharedExpertWeights(
            up=linear("up", I, H),
            down=linear("down", H, I),
            gate=linear("gate", I, H) if shared.activation.gated else None,
            output_gate=load_linear(checkpoint, (f"{prefix}_gate",), 1, H) if shared.gate else None,
        )

    def load_latent(self, checkpoint: Checkpoint, layer: int, config: MoEConfig) -> LatentWeights | None:
        """Reads the projections around experts of a latent width. Returns None if they have the model's width."""
        return None

    def block(self, checkpoint: Checkpoint, layer: int) -> str:
        """Returns the name of the layer's MoE block in this checkpoint. Raises CheckpointError."""
        return self._names(checkpoint, layer)[0]

    def expert_modules(self, layer: int) -> tuple[str, ...]:
        """Returns the names by which per-module quantisation settings may know the layer's experts."""
        prefixes = [f"{block.format(layer)}.experts" for block in self.blocks]
        aliases = [alias for part in ("down", "gate", "up") for alias in self.aliases.get(part, ())]
        return (*(f"{prefix}.0.{alias}" for alias in aliases for prefix in prefixes), *prefixes)

    def _names(self, checkpoint: Checkpoint, layer: int) -> tuple[str, str]:
        """Returns the names of the layer's MoE block and of its router in this checkpoint. Raises CheckpointError."""
        blocks = [block.format(layer) for block in self.blocks]
        found = {f"{block}.{name}.weight": (block, f"{block}.{name}") for block in blocks for name in self.routers}
        return found[checkpoint.first(*found)]

    def _correction_bias(self, checkpoint: Checkpoint, block: str, config: MoEConfig) -> torch.Tensor | None:
        if not self.correction_biases or config.routing.method == "hash":
            return None
        name = checkpoint.first(*(f"{block}.{alias}" for alias in self.correction_biases))
        E = config.num_experts
        shape = (1, E) if checkpoint.manifest[name].shape == (1, E) else (E,)
        return checkpoint.read(name, shape=shape, dtypes=PLAIN, half=torch.float32).float().reshape(E)

    def _token_table(self, checkpoint: Checkpoint, router: str, config: MoEConfig) -> torch.Tensor | None:
        """Reads [V, K] int64 expert ids per vocabulary id (hash routing). Raises CheckpointError for other ids."""
        if config.routing.method != "hash":
            return None
        name = f"{router}.tid2eid"
        table = checkpoint.read(name, dtypes=(torch.int64, torch.int32)).long()
        if table.dim() != 2 or table.shape[1] != config.top_k or table.numel() == 0:
            raise CheckpointError(
                f"{checkpoint.where(name)} has shape {tuple(table.shape)}: expected (V, {config.top_k})"
            )
        low, high = (int(v) for v in torch.aminmax(table))
        if low < 0 or high >= config.num_experts:
            raise CheckpointError(
                f"{checkpoint.where(name)} holds expert ids {low} to {high}: expected 0 to {config.num_experts - 1}"
            )
        return table


def _read_as(checkpoint: Checkpoint, dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Reads plain numbers as another dtype, whose largest number may be smaller. Raises CheckpointError."""
    found = checkpoint.read(name, shape=shape, dtypes=PLAIN, half=dtype).to(dtype)
    require_finite(found, f"{checkpoint.where(name)}, as {dtype},")
    return found


class FieldFamily(ModelFamily):
    """A family whose layers are told by single fields of config.json. Class attributes say which.

    Attributes:
        num_experts, top_k, intermediate_size: fields of these sizes; the first that is set is taken.
        num_shared: the field that counts the shared experts, each as wide as a routed one; "" where there are none.
        fixed_routing: how routers choose and weight experts, where the config doesn't say that.
        settings: fields that select other maths -> the only value that this family computes.
        bias, weight_on_input: see `MoEConfig`.
    """

    num_experts: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts")
    top_k: ClassVar[tuple[str, ...]] = ("num_experts_per_tok",)
    intermediate_size: ClassVar[tuple[str, ...]] = ("moe_intermediate_size",)
    num_shared: ClassVar[str] = ""
    fixed_routing: ClassVar[Routing]
    settings: ClassVar[dict[str, object]] = {"hidden_act": "silu"}
    bias: ClassVar[bool] = False
    weight_on_input: ClassVar[bool] = False

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        if layer not in (layers := self.moe_layers(hf)):
            raise ConfigError(f"layer {layer!r} is not a mixture of experts; this model's are {shown(layers)}")
        for name, supported in self.settings.items():
            expect(hf, name, supported)
        return MoEConfig(
            num_experts=integer(hf, *self.num_experts),
            top_k=integer(hf, *self.top_k),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, *self.intermediate_size),
            activation=self.activation(hf),
            routing=self.routing(hf, layer),
            bias=self.bias,
            weight_format=scheme_of(hf, self.expert_modules(layer)).format,
            shared=self.shared_expert(hf),
            weight_on_input=self.weight_on_input,
        )

    def activation(self, hf: dict[str, Any]) -> Activation:
        """Returns the activation of the routed and the shared experts."""
        return Activation()

    def routing(self, hf: dict[str, Any], layer: int) -> Routing:
        """Returns how this layer's router chooses and weights experts."""
        return self.fixed_routing

    def shared_expert(self, hf: dict[str, Any]) -> SharedExpert | None:
        """Returns the shared expert, or None if the layers have none."""
        count = integer(hf, self.num_shared, default=0) if self.num_shared else 0
        width = count * integer(hf, *self.intermediate_size)
        return SharedExpert(width, activation=self.activation(hf)) if count else None


class NestedText(ModelFamily):
    """A mix-in before the family of a text model, for the same model where the config nests it."""

    def text_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        return flatten(hf)

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return super().moe_layers(self.text_config(hf))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        return super().moe_config(self.text_config(hf), layer)
