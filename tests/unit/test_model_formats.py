"""ModelOpt's and DeepSeek's packed formats: variants of their storage and settings, and each bad scale refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.cases.model_cases import equal, packed, refuses, same_numbers, saved
from support.cases.model_recipes import RECIPES, make_model
from support.cases.number_formats import e8m0_numbers
from support.cases.packed_checkpoints import EACH, PACK, QUANT, edit, pack, resized

from eprt.config import ParallelConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.experts.reference import decode_matrix
from eprt.models import load_layer
from eprt.models.checkpoint import SINGLE, Checkpoint
from eprt.models.fields import e8m0_scale, positive_scale
from eprt.models.formats import load_linear

DOWN = {  # a matrix of a local expert
    **dict.fromkeys(("qwen3_moe", "deepseek_v3"), "model.layers.1.mlp.experts.2.down_proj"),
    "deepseek_v4": "model.layers.1.ffn.experts.2.w2",
    "nemotron_h": "backbone.layers.1.mixer.experts.2.down_proj",
}


class TestPacked:
    @pytest.mark.parametrize("stored", ["e8m0", "f32"])
    def test_v4_scales_in_other_dtypes(self, tmp_path, stored):
        *_, layer, folders = saved("deepseek_v4")
        plain = load_layer(pack(folders["original"], tmp_path / "u8", "mxfp4"), layer).experts

        def convert(codes):
            return codes.view(torch.float8_e8m0fnu) if stored == "e8m0" else e8m0_numbers(codes)

        def change(held):
            return {name: convert(t) if name.endswith(".scale") else t for name, t in held.items()}

        other = load_layer(edit(tmp_path / "u8", tmp_path / stored, change), layer).experts
        for matrix, expected in ((other.gate_up, plain.gate_up), (other.down, plain.down)):
            equal(matrix.scales, expected.scales)
            equal(matrix.codes, expected.codes)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
    def test_scales_of_blocks_in_other_dtypes(self, tmp_path, dtype):
        """Qwen publishes bf16 and float16 ones."""
        folder, _, layer = packed(tmp_path, "fp8_block")
        scales = {name: t.to(dtype) for name, t in load_file(folder / SINGLE).items() if name.endswith("_scale_inv")}
        known = load_layer(edit(folder, tmp_path / "known", {name: t.float() for name, t in scales.items()}), layer)
        found = load_layer(edit(folder, tmp_path / "other", scales), layer)
        equal(found.experts.gate_up.scale, known.experts.gate_up.scale)
        equal(found.experts.down.scale, known.experts.down.scale)

    def test_v4_stacked_as_transformers_keeps_it(self, tmp_path):
        """int8 codes and `_scale_inv`, all experts in one tensor."""
        *_, layer, folders = saved("deepseek_v4")
        apart = load_layer(pack(folders["original"], tmp_path / "apart", "mxfp4"), layer).experts
        prefix = "model.layers.1.mlp.experts."
        changes = {}
        for name, matrix in (("gate_up_proj", apart.gate_up), ("down_proj", apart.down)):
            changes[prefix + name] = matrix.codes.view(torch.int8)
            changes[f"{prefix}{name}_scale_inv"] = matrix.scales.view(torch.float8_e8m0fnu)
        config = {"quantization_config": QUANT["mxfp4"]}
        folder = edit(folders["stacked"], tmp_path / "stacked", changes, config)
        found = load_layer(folder, layer, ParallelConfig(2), 1).experts
        for matrix, expected in ((found.gate_up, apart.gate_up), (found.down, apart.down)):
            equal(matrix.codes, expected.codes[4:])
            equal(matrix.scales, expected.scales[4:])

    def test_weight_only_has_no_input_scale(self, tmp_path):
        folder, _, layer = packed(tmp_path, "nvfp4")
        bare = edit(folder, tmp_path / "b", lambda h: {k: v for k, v in h.items() if not k.endswith("input_scale")})
        assert load_layer(bare, layer).experts.gate_up.input_scale is None

    @pytest.mark.parametrize(("case", "format"), [("qwen3_moe", "nvfp4"), ("nemotron_h", "fp8_tensor")])
    def test_an_expert_that_calibration_never_met_has_no_input_scale(self, tmp_path, case, format):
        """ModelOpt writes none for it: no rank has a matrix with some of them, whichever experts it holds."""
        folder, _, layer = packed(tmp_path, format, case=case)
        missing = edit(folder, tmp_path / "b", drop=(f"{DOWN[case]}.input_scale",))
        for rank in range(2):
            whole, found = (load_layer(f, layer, ParallelConfig(2), rank).experts for f in (folder, missing))
            assert found.down.input_scale is None
            equal(found.gate_up.input_scale, whole.gate_up.input_scale)
            for name, tensor in found.down.tensors().items():
                equal(tensor, whole.down.tensors()[name])


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
def test_llama_4_in_fp8_by_channel(tmp_path, apart):
    """Stacked as Meta publishes it, inputs first; expert by expert as llm-compressor writes it."""
    *_, layer, folders = saved("llama4_text")
    held, stored, numbers = load_file(folders["original"] / SINGLE), {}, {}
    experts = f"model.layers.{layer}.feed_forward.experts"
    for name in ("gate_up_proj", "down_proj"):
        stacked = held.pop(f"{experts}.{name}").float()
        scale = (stacked.abs().amax(1, keepdim=True) / 448).bfloat16()
        data = (stacked / scale.float()).to(torch.float8_e4m3fn)
        numbers[f"{experts}.{name}"] = data.float() * scale.float()
        if not apart:
            stored |= {f"{experts}.{name}": data, f"{experts}.{name}_scale": scale}
            continue
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        for part, codes, scales in zip(parts, data.chunk(len(parts), 2), scale.chunk(len(parts), 2), strict=True):
            for expert in range(len(data)):
                prefix = f"{experts}.{expert}.{part}"
                stored |= {f"{prefix}.weight": codes[expert].T, f"{prefix}.weight_scale": scales[expert].T}
    config = {"quantization_config": QUANT["float_channel"] | {"ignore": ["re:.*shared_expert.*", "re:.*router.*"]}}
    edit(folders["original"], tmp_path / "packed", lambda _: held | stored, config)
    plain = {name: tensor.float() for name, tensor in held.items()} | numbers
    edit(folders["original"], tmp_path / "plain", lambda _: plain, {"dtype": "float32"})
    for rank in range(2):
        found, known = (load_layer(tmp_path / path, layer, ParallelConfig(2), rank) for path in ("packed", "plain"))
        assert found.config.weight_format == "fp8_channel"
        same_numbers(found, known)


@pytest.mark.parametrize("each", [(), (8, 1, 1)], ids=["of-all", "of-each"])
@pytest.mark.parametrize("format", ["fp8_tensor", "nvfp4"])
def test_llama_4_as_modelopt_exports_it(tmp_path, format, each):
    """Stacked, inputs first, with names of its own for scales; those of matrices are one number for all experts. Others
    have one for each."""
    *_, layer, folders = saved("llama4_text")
    held, stored, numbers = load_file(folders["original"] / SINGLE), {}, {}
    for name in ("gate_up_proj", "down_proj"):
        module = f"model.layers.{layer}.feed_forward.experts.{name}"
        made = [PACK[format](*expert.T.shape) for expert in held.pop(module)]
        tensors = {suffix: torch.stack([parts[suffix] for parts, _ in made]) for suffix in made[0][0]}
        scale = "weight_scale_2" if format == "nvfp4" else "weight_scale"
        own = tensors[scale].clone()
        for suffix in (scale, "input_scale"):
            tensors[suffix] = tensors[suffix].view(each) if each else tensors[suffix][0]
        factors = [tensors[scale].reshape(-1)[expert if each else 0] / own[expert] for expert in range(8)]
        numbers[module] = torch.stack([value * factor for (_, value), factor in zip(made, factors, strict=True)]).mT
        for suffix, tensor in tensors.items():
            ending = "" if suffix == "weight" else f"_{suffix}"
            stored[module + ending] = tensor.mT if tensor.numel() > 8 else tensor
    edit(folders["original"], tmp_path / "packed", lambda _: held | stored, {"quantization_config": QUANT[format]})
    plain = {name: tensor.float() for name, tensor in held.items()} | numbers
    edit(folders["original"], tmp_path / "plain", lambda _: plain, {"dtype": "float32"})
    for rank, cut in ((0, 1), (1, 1), (1, 2)):
        parallel = ParallelConfig(2, moe_tp_size=cut)
        found, known = (load_layer(tmp_path / path, layer, parallel, rank) for path in ("packed", "plain"))
        same_numbers(found, known, rtol=1e-6)
        assert found.experts.down.input_scale.shape == (found.experts.num_local_experts, 1)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (1, 1)), (torch.bfloat16, ())])
def test_fp8_by_tensor_with_transformers_names(tmp_path, dtype, shape):
    """`FineGrainedFP8Config(weight_block_size=None)`, also with static activations."""
    folder, plain, layer = packed(tmp_path, "fp8_tensor", case="deepseek_v3")
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}

    def renamed(held):
        ends = {name: name.rpartition(".")[2] for name in held}
        scales = {name: held[name].to(dtype).view(shape) for name in held if ends[name] in names}
        others = {name: tensor for name, tensor in held.items() if name not in scales}
        return others | {name.replace(ends[name], names[ends[name]]): scale for name, scale in scales.items()}

    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    found = load_layer(edit(folder, tmp_path / "renamed", renamed, config), layer)
    known = load_layer(folder, layer)
    assert found.config.weight_format == "fp8_tensor"
    for name in ("gate_up", "down"):
        matrix, other = getattr(found.experts, name), getattr(known.experts, name)
        equal(matrix.scale, other.scale.to(dtype).float())
        equal(matrix.input_scale, other.input_scale.to(dtype).float())
    if dtype == torch.float32:
        same_numbers(found, load_layer(plain, layer))
        equal(found.shared.up, known.shared.up)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shared_expert_has_the_models_dtype(tmp_path, dtype):
    """Packed matrices, and a gate that is stored in float32."""
    folder, _, layer = packed(tmp_path, "fp8_tensor", {"dtype": dtype}, "qwen3_5_moe_text")
    shared = load_layer(folder, layer).shared
    assert {tensor.dtype for tensor in vars(shared).values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, None, torch.float32),
    ],
)
def test_experts_get_the_configs_dtype_and_without_one_that_of_the_files(tmp_path, files, config, expected):
    *_, layer, folders = saved("qwen3_moe")
    tensors = {name: (t * 1.001).to(files) for name, t in load_file(folders["original"] / SINGLE).items()}
    folder = edit(folders["original"], tmp_path, tensors, {"dtype": config})
    down = [tensors[DOWN["qwen3_moe"].replace(".2.", f".{expert}.") + ".weight"] for expert in range(8)]
    equal(load_layer(folder, layer).experts.down.data, torch.stack(down).to(expected))


def test_float32_numbers_that_bf16_does_not_hold_are_refused(tmp_path):
    name = f"{DOWN['qwen3_moe']}.weight"
    largest = {name: torch.full((64, 96), torch.finfo(torch.float32).max)}
    assert refuses(f"'{name}', as torch.bfloat16, holds inf", tmp_path, "qwen3_moe", largest) is CheckpointError


FUSED = ("gate_up", "down")


class TestQuantizationConfig:
    @pytest.mark.parametrize(
        ("format", "layers"),
        [
            ("nvfp4", {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4"}, "lm_head": {"quant_algo": "FP8"}}),
            ("nvfp4", {"model.layers.1.mlp": {"quant_algo": "NVFP4"}, "model.layers.1": {"quant_algo": "FP8"}}),
            ("nvfp4", {f"model.layers.1.mlp.experts.{matrix}_proj": {"quant_algo": "NVFP4"} for matrix in FUSED}),
            ("fp8_block", {"model.layers.1.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128}}),
            ("fp8_tensor", {name: {"quant_algo": "FP8"} for name in EACH}),
        ],
        ids=["by module", "by a module around it", "by fused matrices", "by blocks", "by linear"],
    )
    def test_mixed_precision(self, tmp_path, format, layers):
        quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        folder, _, layer = packed(tmp_path, format, {"quantization_config": quant})
        assert load_layer(folder, layer).config.weight_format == format

    @pytest.mark.parametrize("said", ["nvfp4", "fp8_tensor", "fp8_block", "mxfp8"])
    def test_plain_tensors_that_the_config_calls_packed(self, tmp_path, said):
        config, words = {"quantization_config": QUANT[said]}, r"experts\.0\.gate_proj\.weight' has dtype BF16: expected"
        assert refuses(words, tmp_path, "qwen3_moe", config=config) is CheckpointError

    def test_packed_tensors_that_the_config_calls_plain(self, tmp_path):
        folder, _, layer = packed(tmp_path, "fp8_block")
        folder = edit(folder, tmp_path / "b", drop=("quantization_config",))
        with pytest.raises(CheckpointError, match="has dtype F8_E4M3: expected BF16"):
            load_layer(folder, layer)

    def test_a_scale_that_transformers_writes_beside_a_plain_weight(self, tmp_path):
        """Of a matrix whose sizes blocks don't divide, as the gate's one row; it multiplies by the weight as it is."""
        folder, _, layer = packed(tmp_path, "fp8_block", case="qwen3_5_moe_text")
        gate = f"model.layers.{layer}.mlp.shared_expert_gate"
        junk = {f"{gate}.weight_scale_inv": torch.full((1, 1), float("nan"))}
        found, known = (load_layer(edit(folder, tmp_path / "b", more), layer) for more in (junk, None))
        equal(found.shared.output_gate, known.shared.output_gate)
        with pytest.raises(CheckpointError, match=r"gate\.scale' belongs"):
            load_layer(edit(folder, tmp_path / "c", {f"{gate}.scale": torch.ones(1, 1)}), layer)

    def test_a_tensor_named_like_those_of_all_experts(self, tmp_path):
        extra = {f"{DOWN['qwen3_moe']}.weight".replace(".2.", ".*."): torch.zeros(1)}
        assert refuses(r"experts\.\*\.down_proj\.weight' belongs", tmp_path, "qwen3_moe", extra) is CheckpointError


NAN, INF = float("nan"), float("inf")
FLOAT32 = [
    ("qwen3_moe", "nvfp4", "weight_scale_2"),
    ("qwen3_moe", "nvfp4", "input_scale"),
    ("nemotron_h", "fp8_tensor", "weight_scale"),
    ("nemotron_h", "fp8_tensor", "input_scale"),
    ("deepseek_v3", "fp8_block", "weight_scale_inv"),
]
BAD_SCALES = [
    *((*tensor, value) for tensor in FLOAT32 for value in (0.0, -1.0, NAN, INF)),
    *((*tensor, None) for tensor in FLOAT32 if tensor[2] != "input_scale"),
    *(("qwen3_moe", "nvfp4", "weight_scale", value) for value in (-0.5, NAN, None)),
    *(("deepseek_v4", "mxfp4", "scale", value) for value in (255, None)),
    *(("qwen3_moe", "mxfp8", "weight_scale", value) for value in (255, None)),
]


class TestScales:
    @pytest.mark.parametrize(("case", "format", "suffix", "value"), BAD_SCALES)
    def test_a_bad_scale_of_one_expert_is_named(self, tmp_path, case, format, suffix, value):
        """The error names file, tensor and value. None: the tensor is missing."""
        folder, _, layer = packed(tmp_path, format, case=case)
        name = f"{DOWN[case]}.{suffix}"
        tensor = load_file(folder / SINGLE)[name]
        load_layer(folder, layer)
        if value is not None:
            tensor.view(-1)[-1:] = torch.tensor(value).to(tensor.dtype)
        folder = edit(folder, tmp_path / "bad", {name: tensor}, drop=(name,) if value is None else ())
        with pytest.raises(CheckpointError) as caught:
            load_layer(folder, layer)
        words = [f"'{name}'"] if value is None else [f"'{name}'", str(folder / SINGLE), str(value)]
        assert all(word in str(caught.value) for word in words), caught.value
        # A rank that holds other experts loads, unless every rank can see it in the headers.
        load_layer(folder, layer, ParallelConfig(4), 0)

    def test_every_power_of_two_becomes_its_byte(self):
        bytes_ = torch.arange(255, dtype=torch.uint8)
        powers = torch.ldexp(torch.ones(255, dtype=torch.float64), bytes_.double() - 127).float()
        assert powers[0] == 2.0**-127
        assert torch.equal(e8m0_scale(powers, "t"), bytes_)

    @pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 1.0000001, 2.0**-128, float("inf"), float("nan")])
    def test_other_floats_are_no_e8m0(self, value):
        with pytest.raises(CheckpointError, match=r"^t: 1 of 2 scales such as .* expected powers of two"):
            e8m0_scale(torch.tensor([[1.0, value]]), "t")

    def test_smallest_e8m0_is_legal_and_float8_block_scales_become_float32(self):
        zero = torch.zeros(2, 2, dtype=torch.uint8)
        equal(e8m0_scale(zero, "t"), zero)
        equal(positive_scale(zero.view(torch.float8_e8m0fnu), "t"), torch.full((2, 2), 2.0**-127))
        with pytest.raises(CheckpointError, match="nan"):
            positive_scale(torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), "t")


def test_a_block_scale_of_nvfp4_that_became_zero(tmp_path):
    """Of a block 2**19 times smaller than its matrix, as ModelOpt wrote it before it clamped scales to 2**-9."""
    folder, _, layer = packed(tmp_path, "nvfp4")
    name = f"{DOWN['qwen3_moe']}.weight_scale"
    scales = load_file(folder / SINGLE)[name]
    scales[1, 2] = 0
    down = load_layer(edit(folder, tmp_path / "edited", {name: scales}), layer).experts.down
    assert (decode_matrix(down, 1)[2, 1].view(-1, 16) == 0).all(1).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("dialect", ["gptq", "awq"])
def test_a_last_group_that_is_shorter_is_refused(tmp_path, dialect):
    """Decoders split the columns evenly: 192 into 96 and 96, not 128 and 64."""
    recipe = resized(RECIPES["deepseek_v3"], {"hidden_size": 128, "moe_intermediate_size": 192, "n_shared_experts": 1})
    make_model(recipe, torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder = pack(tmp_path / "plain", tmp_path / "packed", dialect)
    changed = {"quantization_config": QUANT[dialect] | {"group_size": 128}}
    groups = {"scales": lambda t: t[: (len(t) + 3) // 4], "qzeros": lambda t: t[: (len(t) + 3) // 4]}
    groups["g_idx"] = lambda t: torch.arange(len(t), dtype=torch.int32) // 128
    held = load_file(folder / SINGLE)
    shorter = {name: groups[end](t) for name, t in held.items() if (end := name.rpartition(".")[2]) in groups}
    folder = edit(folder, tmp_path / "bad", shorter, changed)
    said = r"192 rows or columns, by the config, are no multiple of its blocks of 128; quantise"
    with pytest.raises(ConfigError, match=rf"experts\.0\.down_proj\..*{said}"):
        load_layer(folder, recipe.layer)
    with Checkpoint(folder) as files, pytest.raises(ConfigError, match=rf"shared_experts\.down_proj\..*{said}"):
        load_linear(files, ("model.layers.1.mlp.shared_experts.down_proj",), 128, 192)


@pytest.mark.parametrize(
    ("format", "suffix", "said"),
    [
        ("nvfp4", "weight_scale_2", r"down_proj\.weight_scale_2' is missing"),
        (
            "fp8_block",
            "weight_scale_inv",
            r"down_proj\.weight' has dtype F8_E4M3: expected .*weight_scale_inv.* beside",
        ),
    ],
)
def test_a_shared_expert_without_its_scale_says_which(tmp_path, format, suffix, said):
    folder, _, layer = packed(tmp_path, format, case="deepseek_v3")
    name = f"model.layers.{layer}.mlp.shared_experts.down_proj.{suffix}"
    with pytest.raises(CheckpointError, match=said):
        load_layer(edit(folder, tmp_path / "bad", drop=(name,)), layer)
