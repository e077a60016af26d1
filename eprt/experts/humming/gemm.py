"""One grouped matrix of humming's: its weight layout, made expert by expert, and its compiled kernels.

humming compiles a kernel for each shape and schedule. Its own heuristics choose the schedule from the expected number
of rows. The operators are those of humming 0.1.19; it keeps compiled code in `$HUMMING_CACHE_DIR` (default
`~/.humming/cache`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from eprt.config import WeightFormat
from eprt.errors import ConfigError
from eprt.experts.padding import TILE, pad_parts, stack_experts
from eprt.rounding import round_up
from eprt.support import stream_number
from eprt.weights import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK, Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4

GemmType = Literal["grouped_contiguous", "grouped_masked"]

# humming's names of the checkpoint formats. FP8 with one scale per matrix is stored as equal block scales: exact, where
# a scale per row would be rounded to bf16.
_FP8 = {
    "b_dtype": "float8e4m3",
    "bs_dtype": "float32",
    "weight_scale_group_size": FP8_BLOCK,
    "weight_scale_group_size_n": FP8_BLOCK,
    "weight_scale_type": "block",
}
WEIGHT_SCHEMAS: dict[WeightFormat, dict[str, Any]] = {
    "mxfp4": {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": MX_BLOCK},
    "nvfp4": {"b_dtype": "float4e2m1", "bs_dtype": "float8e4m3", "weight_scale_group_size": NVFP4_BLOCK},
    "fp8_tensor": _FP8,
    "fp8_block": _FP8,
}
# FP8 activations, scaled as the kernels of each weight format want them. NVFP4 x FP8 has no SM90 schedule in humming.
_GROUPS = {"a_dtype": "float8e4m3", "input_scale_group_size": FP8_BLOCK, "input_quant_mode": "dynamic_group"}
FP8_INPUT_SCHEMAS: dict[WeightFormat, dict[str, Any]] = {
    "mxfp4": {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_token"},
    "fp8_tensor": _GROUPS,
    "fp8_block": _GROUPS,
}

# int32 of stream-K state: at most 1.1 x (warpgroups of 128 threads that fit the device) are used, 2605 on 148 SMs.
LOCKS = 4096
LOCK_SETS = 8  # streams that can run one matrix at the same time

ANY_ROWS = 1 << 30
COLD_STEP = 4  # without warm-up one schedule serves 2 ** 4 times as many rows: fewer kernels to compile on the way


def row_bucket(rows: int, step: int = 1) -> int:
    """Returns the smallest power of `2 ** step` that is at least `rows`."""
    exponent = (max(rows, 1) - 1).bit_length()
    return 1 << round_up(exponent, step)


@dataclass(frozen=True)
class GemmShape:
    """The canonical size of one matrix (`rows` per part x `cols`), and the side that humming itself pads.

    The intermediate size is padded here, each half on its own. humming's kernel pads H, so that tokens needn't be.
    """

    parts: int
    rows: int
    cols: int
    hidden_side: Literal["rows", "cols"]

    @property
    def padded(self) -> tuple[int, int]:
        """The size (rows of a part, columns) after padding to multiples of 128."""
        return round_up(self.rows, TILE), round_up(self.cols, TILE)


def expert_tensors(matrix: Matrix, bias: torch.Tensor | None, shape: GemmShape, channel_scale: bool) -> dict[str, Any]:
    """Returns one expert (leading dimension 1) as humming's transform reads it: padded, in humming's dtypes.

    Args:
        channel_scale: NVFP4 only: gate and up have different second scales, so there is one per row (bf16); else there
            is one per matrix (float32, exact).

    Raises:
        ConfigError: humming has no kernels for this number format.
    """
    match matrix:
        case Mxfp4():
            tensors = _fp4_tensors(matrix, MX_BLOCK, shape)
            tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e8m0fnu)
        case Nvfp4():
            tensors = _fp4_tensors(matrix, NVFP4_BLOCK, shape)
            spread = matrix.global_scale.repeat_interleave(shape.padded[0], dim=1).to(torch.bfloat16)
            tensors["weight_scale_2"] = spread if channel_scale else matrix.global_scale[:, 0].contiguous()
        case Fp8Block() | Fp8Tensor():
            tensors = _fp8_tensors(matrix, shape)
        case _:
            raise ConfigError(f"humming takes {', '.join(WEIGHT_SCHEMAS)} weights, not {type(matrix).__name__}")
    if bias is not None:
        tensors["bias"] = pad_parts(bias, shape.parts, shape.padded[0]).to(torch.bfloat16)
    return tensors


def _fp4_tensors(matrix: Mxfp4 | Nvfp4, block: int, shape: GemmShape) -> dict[str, torch.Tensor]:
    rows, cols = shape.padded
    return {
        "weight": pad_parts(matrix.codes, shape.parts, rows, cols // 2).view(torch.int32),
        "weight_scale": pad_parts(matrix.scales, shape.parts, rows, cols // block),
    }


def _fp8_tensors(matrix: Fp8Block | Fp8Tensor, shape: GemmShape) -> dict[str, torch.Tensor]:
    rows, cols = shape.padded
    high, wide = rows // FP8_BLOCK, cols // FP8_BLOCK
    if isinstance(matrix, Fp8Block):
        scale = pad_parts(matrix.scale, shape.parts, high, wide)
    else:
        scale = matrix.scale.repeat_interleave(high, 1)[:, :, None].expand(-1, -1, wide).contiguous()
    return {"weight": pad_parts(matrix.data, shape.parts, rows, cols).view(torch.int32), "weight_scale": scale}


def layer_config(
    weight_format: WeightFormat,
    shape: GemmShape,
    device: torch.device,
    *,
    bias: bool,
    fp8_inputs: bool = False,
    channel_scale: bool = False,
) -> Any:
    """Returns humming's `LayerConfig` of one expert's matrix; arguments as in `GroupedGemm` and `expert_tensors`."""
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    rows, cols = shape.parts * shape.padded[0], shape.padded[1]
    schema = dict(WEIGHT_SCHEMAS[weight_format])
    if weight_format == "nvfp4":
        schema["weight_scale_2_type"] = "channel" if channel_scale else "tensor"
    inputs = FP8_INPUT_SCHEMAS.get(weight_format) if fp8_inputs else None
    return prepare_layer_config(
        shape_n=shape.rows if shape.hidden_side == "rows" else rows,
        shape_k=shape.cols if shape.hidden_side == "cols" else cols,
        weight_schema=HummingWeightSchema(**schema),
        input_schema=None if inputs is None else HummingInputSchema(**inputs),
        num_experts=1,
        pad_n_to_multiple=TILE,
        pad_k_to_multiple=TILE,
        has_bias=bias,
        torch_dtype=torch.bfloat16,
        device=device,
    )


class GroupedGemm:
    """Computes `rows @ matrix[e].T + bias[e]` for rows grouped by expert.

    Args:
        matrix, bias: canonical, of all local experts, on any device; not kept.
        fp8_inputs: FP8 activations.
        batch_invariant: schedules whose sums don't depend on the batch.
        channel_scale: see `expert_tensors`; None: what these values need.

    Raises:
        ConfigError: values that need `channel_scale`, where it is to be False.
    """

    def __init__(
        self,
        matrix: Matrix,
        bias: torch.Tensor | None,
        shape: GemmShape,
        device: torch.device,
        *,
        fp8_inputs: bool = False,
        batch_invariant: bool = False,
        channel_scale: bool | None = None,
    ) -> None:
        self.device = device
        self.batch_invariant = batch_invariant
        needed = isinstance(matrix, Nvfp4) and bool((matrix.global_scale != matrix.global_scale[:, :1]).any())
        self.channel_scale = needed if channel_scale is None else channel_scale
        if needed and not self.channel_scale:
            raise ConfigError("gate and up now have different second scales, the layer holds one: build it again")
        options = {"bias": bias is not None, "fp8_inputs": fp8_inputs, "channel_scale": self.channel_scale}
        with torch.cuda.device(device):
            one = layer_config(matrix.format[0], shape, device, **options)
            self.tensors = _prepare_experts(matrix, bias, shape, one, device, self.channel_scale)
        self.config = dataclasses.replace(one, num_experts=matrix.shape[0])
        self.out_features: int = self.config.shape_n - self.config.pad_shape_n
        self.in_features: int = self.config.shape_k - self.config.pad_shape_k
        self._tables: dict[tuple[GemmType, int], torch.Tensor] = {}  # by number of rows; ANY_ROWS after a warm-up
        # Zeroed here, not on first use: that could be inside a graph's capture, and be undone by replaying another.
        self._locks = torch.zeros(LOCK_SETS, LOCKS, dtype=torch.int32, device=device)
        self._lock_sets: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        inputs: torch.Tensor,
        layout: torch.Tensor,
        gemm_type: GemmType,
        expected_rows: int,
        out: torch.Tensor,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        """Launches the GEMM into `out`. Rows of `out` outside the groups aren't written.

        Args:
            inputs: [rows, K] bf16, or e4m3 with `input_scale`.
            layout: `grouped_contiguous`: int64 [L + 1] offsets; `grouped_masked`: int32 [L] counts of equal blocks.
            expected_rows: how many rows are probably in the groups; chooses the schedule, never the result.
        """
        tensors = self.tensors
        weights = tensors["weight"], tensors["weight_scale"], tensors.get("weight_scale_2")
        # The library's operator itself: its Python wrapper costs as much host time as the launch. By position: second
        # input scale, zero point; sorted ids, expert ids, padded rows and top-k are of `indexed` alone; shapes and
        # dtypes follow from this class, so humming needn't check them.
        torch.ops.humming.launch_kernel.out(
            *(self.table(gemm_type, expected_rows), inputs, *weights, input_scale, None, None),
            *(tensors.get("bias"), out, None, None, None),
            *(layout, self._stream_locks(), 1, expected_rows, False),
        )

    def _stream_locks(self) -> torch.Tensor:
        """Returns this stream's stream-K counters, which concurrent launches mustn't share; kernels leave zeros."""
        stream = stream_number(self.device)
        found = self._lock_sets.get(stream)
        if found is None:
            found = self._lock_sets[stream] = self._locks[len(self._lock_sets) % LOCK_SETS]
        return found

    def compile(self, gemm_type: GemmType, expected_rows: int) -> None:
        """Compiles the kernel for about `expected_rows` rows, which a call without a warm-up needs."""
        bucket = row_bucket(expected_rows, COLD_STEP)
        self._tables[gemm_type, bucket] = self._compile(gemm_type, [bucket])

    def warmup(self, gemm_type: GemmType, max_rows: int) -> None:
        """Compiles a kernel for each power of two up to the one that holds `max_rows`; more rows use the last."""
        buckets = [1 << power for power in range(row_bucket(max_rows).bit_length())]
        self._tables[gemm_type, ANY_ROWS] = self._compile(gemm_type, buckets)

    def table(self, gemm_type: GemmType, expected_rows: int) -> torch.Tensor | None:
        """Returns humming's table (rows from, to, kernel, CTAs) that holds the schedule for this number of rows; None:
        it isn't compiled."""
        table = self._tables.get((gemm_type, ANY_ROWS))
        return self._tables.get((gemm_type, row_bucket(expected_rows, COLD_STEP))) if table is None else table

    def _compile(self, gemm_type: GemmType, buckets: list[int]) -> torch.Tensor:
        """Compiles humming's choice for each number of rows, many at once. The last serves all larger numbers."""
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        compute: dict[str, Any] = {"gemm_type": gemm_type, "use_batch_invariant": self.batch_invariant}
        ends = [0, *buckets[:-1], ANY_ROWS]
        with torch.cuda.device(self.device):
            chosen = [get_heuristics_config(self.config, shape_m=m, device=self.device, **compute) for m in buckets]
            intervals = list(zip(ends[:-1], ends[1:], chosen, strict=True))
            return HummingKernel.prepare_kernels(
                self.config.to_str(), json.dumps(compute), json.dumps(intervals), self.device
            )


def _prepare_experts(
    matrix: Matrix, bias: torch.Tensor | None, shape: GemmShape, one: Any, device: torch.device, channel_scale: bool
) -> dict[str, torch.Tensor]:
    """Transforms expert by expert, so that one expert's temporaries at a time lie beside the layer."""
    from humming.transform import transform_humming_tensors

    def prepare(index: int) -> dict[str, torch.Tensor]:
        own = matrix.expert(index).map(lambda tensor: tensor.to(device))
        own_bias = None if bias is None else bias[index : index + 1].to(device)
        return transform_humming_tensors(one, expert_tensors(own, own_bias, shape, channel_scale), True)

    return stack_experts(matrix.shape[0], prepare)
