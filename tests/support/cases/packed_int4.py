"""Matrices as compressed-tensors, GPTQ and AWQ pack them, nibble by nibble; what they stand for is known beforehand."""

from __future__ import annotations

import torch

Made = tuple[dict[str, torch.Tensor], torch.Tensor]  # (stored tensors by suffix, the numbers they stand for, float32)
GROUP = 32
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """int [..., 8 n] -> int32 [..., n], the first of eight in the lowest nibble."""
    eights = nibbles.long().unflatten(-1, (-1, 8))
    total = sum(eights[..., i] * 16**i for i in range(8))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def awq_words(nibbles: torch.Tensor) -> torch.Tensor:
    """int [..., 8 n, cols] -> int32 [..., cols, n]: eight outputs a word, in AWQ's order."""
    return words(nibbles.mT.unflatten(-1, (-1, 8))[..., list(AWQ)].flatten(-2))


def numbers(rows: int, cols: int, group: int, dtype: torch.dtype = torch.bfloat16, zeros: bool = False):
    """Random codes, scales [rows, groups], zero points of the same shape, and the values."""
    codes = torch.randint(0, 16, (rows, cols))
    sign = torch.randint(0, 2, (rows, cols // group)) * 2 - 1  # AutoRound's have both
    scales = (sign * (torch.rand(rows, cols // group) + 0.5) * cols**-0.5 / 8).to(dtype)
    zero = torch.randint(1, 16, scales.shape) if zeros else torch.full(scales.shape, 8)
    spread = [tensor.repeat_interleave(group, dim=1) for tensor in (zero, scales.float())]
    return codes, scales, zero, (codes - spread[0]) * spread[1]


def pack_quantized(rows: int, cols: int, zeros: bool = False, channel: bool = False) -> Made:
    codes, scales, zero, values = numbers(rows, cols, cols if channel else GROUP, zeros=zeros)
    stored = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([rows, cols])}
    return stored | ({"weight_zero_point": words(zero.T).T.contiguous()} if zeros else {}), values


def float_channel(rows: int, cols: int) -> Made:
    data = torch.randn(rows, cols).mul(40).to(torch.float8_e4m3fn)
    scale = ((torch.rand(rows, 1) + 0.5) * cols**-0.5 / 40).bfloat16()
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


def gptq(rows: int, cols: int, less: int = 1, sym: bool = True, dtype: torch.dtype = torch.float16) -> Made:
    codes, scales, zero, values = numbers(rows, cols, GROUP, dtype, zeros=not sym)
    stored = {
        "qweight": words(codes).T,
        "scales": scales.T,
        "qzeros": words(zero.T - less),
        "g_idx": torch.arange(cols, dtype=torch.int32) // GROUP,
    }
    return stored, values


def act_order(rows: int, cols: int, sym: bool = True) -> Made:
    """GPTQ with `desc_act`: a column's group is anywhere. Matrices that take hidden states, wider in rows here, share
    an order, as they do where all experts saw the same tokens; the others have each their own."""
    shared = torch.Generator().manual_seed(cols) if cols < rows else None
    index = (torch.randperm(cols, generator=shared) // GROUP).to(torch.int32)
    codes, scales, zero, _ = numbers(rows, cols, GROUP, torch.float16, zeros=not sym)
    values = (codes - zero[:, index]) * scales[:, index].float()
    stored = {"qweight": words(codes).T, "scales": scales.T, "qzeros": words(zero.T - 1), "g_idx": index}
    return stored, values


def pack_quantized_act_order(rows: int, cols: int) -> Made:
    stored, values = act_order(rows, cols)
    words = {"weight_packed": stored["qweight"].T, "weight_scale": stored["scales"].T, "weight_g_idx": stored["g_idx"]}
    return words | {"weight_shape": torch.tensor([rows, cols])}, values


def awq(rows: int, cols: int, dtype: torch.dtype = torch.float16) -> Made:
    codes, scales, zero, values = numbers(rows, cols, GROUP, dtype, zeros=True)
    return {"qweight": awq_words(codes), "scales": scales.T, "qzeros": awq_words(zero)}, values


def compressed(format: str, **weights: object) -> dict[str, object]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    named = {"config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]}
    return {"quant_method": "compressed-tensors", "format": format, **named}


_INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
QUANT: dict[str, dict[str, object]] = {
    "pack_quantized": compressed("pack-quantized", **_INT),
    "pack_quantized_zeros": compressed("pack-quantized", **_INT | {"symmetric": False}),
    "pack_quantized_channel": compressed("pack-quantized", **_INT | {"strategy": "channel", "group_size": None}),
    "float_channel": compressed("float-quantized", **_FLOAT, strategy="channel"),
    "float_block": compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[128, 128]),
    "nvfp4_packed": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    ),
    "mxfp4_packed": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True
    ),
    "gptq": GPTQ | {"checkpoint_format": "gptq"},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
    "gptq_act_order": GPTQ | {"desc_act": True, "sym": False},
    "pack_quantized_act_order": compressed("pack-quantized", **_INT | {"actorder": "group"}),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "auto_round": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.layers",
    },
}
PACK = {
    "pack_quantized": pack_quantized,
    "pack_quantized_zeros": lambda rows, cols: pack_quantized(rows, cols, zeros=True),
    "pack_quantized_channel": lambda rows, cols: pack_quantized(rows, cols, channel=True),
    "float_channel": float_channel,
    "gptq": gptq,
    "gptq_v2": lambda rows, cols: gptq(rows, cols, less=0, sym=False),
    "gptq_act_order": lambda rows, cols: act_order(rows, cols, sym=False),
    "pack_quantized_act_order": pack_quantized_act_order,
    "awq": awq,
    "auto_round": gptq,
}
