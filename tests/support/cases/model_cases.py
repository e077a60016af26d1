"""Tiny transformers models with random weights, saved as their families' checkpoints are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from eprt.errors import EprtError
from eprt.experts.reference import decode_matrix
from eprt.models import LayerParts, load_layer
from eprt.placement import ExpertShard
from support.cases import model_recipes
from support.cases.model_recipes import BLOCKS, RECIPES, VARIANTS, known, scratch
from support.cases.packed_checkpoints import edit, pack

# case -> its recipe; the MoE layer that is compared is the recipe's
MODELS = {name: recipe for name, recipe in (RECIPES | VARIANTS).items() if known(recipe)}


def make_model(case: str, dtype: torch.dtype = torch.bfloat16):
    """The model of a case in this dtype, but for what from_pretrained keeps in float32; its MoE block; the layer."""
    recipe = MODELS[case]
    model = model_recipes.make_model(recipe)
    strict = tuple(model._keep_in_fp32_modules_strict or ())
    made = dict(_tensors(type(model)._from_config(model.config, dtype=dtype)))  # HunYuan's router is made in float32
    kept = {
        name: tensor.clone()
        for name, tensor in _tensors(model)
        if tensor.dtype == made[name].dtype or any(part in name for part in strict)
    }
    model.to(dtype)
    for name, tensor in _tensors(model):
        if name in kept:
            tensor.data = kept[name]
    layer = model.model.layers[recipe.layer]
    return model, next(getattr(layer, name) for name in BLOCKS if hasattr(layer, name)), recipe.layer


def _tensors(module: torch.nn.Module):
    return [*module.named_parameters(), *module.named_buffers()]


def moe_layers(model) -> list[int]:
    names = {name for name, _ in model.named_modules() if name.endswith(".experts")}
    return sorted({int(name.split(".")[2]) for name in names})


def canonical_experts(block) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, parts * I, H] with rows [gate; up], and [E, H, I], from a transformers block's own parameters."""
    experts = block.experts
    if type(experts).__name__ == "GptOssExperts":
        gate_up = experts.gate_up_proj.transpose(1, 2)
        return torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1), experts.down_proj.transpose(1, 2)
    if type(experts).__name__ == "Llama4TextExperts":
        return experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    first = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
    return first, experts.down_proj


def shard_of(gate_up: torch.Tensor, down: torch.Tensor, parts: int, shard: ExpertShard):
    """This shard of canonical whole matrices (any tensors with their row and column grids)."""
    mine = slice(shard.first_expert, shard.end_expert)
    gates = gate_up[mine].unflatten(1, (parts, -1)).chunk(shard.moe_tp_size, dim=2)[shard.moe_tp_rank]
    return gates.flatten(1, 2), down[mine].chunk(shard.moe_tp_size, dim=2)[shard.moe_tp_rank]


@functools.cache
def saved(case: str):
    """(model, MoE block, layer, folders) of a case: its checkpoint with the family's own names under "original",
    with transformers' stacked ones under "stacked". Made once a process, gone with it."""
    model, block, layer = make_model(case)
    folders = {kind: scratch(case) / kind for kind in ("original", "stacked")}
    model.save_pretrained(folders["original"])
    model.save_pretrained(folders["stacked"], save_original_format=False)
    return model, block, layer, folders


def equal(found, expected) -> None:
    """Same dtype, same bytes; or both None."""
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def same_numbers(found: LayerParts, known: LayerParts, rtol: float = 0.0) -> None:
    """Asserts that packed experts stand for the numbers of plain ones."""
    for name, parts in (("gate_up", found.config.activation.parts), ("down", 1)):
        values = decode_matrix(getattr(found.experts, name), parts)
        torch.testing.assert_close(values, getattr(known.experts, name).data, rtol=rtol, atol=0)


def packed(target: Path, dialect: str, config=None, case: str = "qwen3_moe", shared: str | None = None):
    """(folder, the same experts in float32, MoE layer) of a model whose 96 columns are three groups."""
    *_, layer, folders = saved(case)
    plain = target / "plain"
    return pack(folders["original"], target / "packed", dialect, config, shared, plain), plain, layer


def refuses(words: str, target: Path, case: str, tensors=None, config=None, drop=(), stored="original"):
    """Asserts that the case's checkpoint, edited so, is refused in these words. Returns the error's type."""
    *_, layer, folders = saved(case)
    folder = edit(folders[stored], target, tensors, config, drop)
    with pytest.raises(EprtError, match=words) as caught:
        load_layer(folder, layer)
    return caught.type
