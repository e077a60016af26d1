"""One grouped matrix of humming's: its layout, made expert by expert, and the kernels chosen for each row count.

humming compiles a kernel for each shape and schedule. Its heuristics choose a schedule from the expected number of
rows; `GroupedGemm.warmup` also times neighbouring schedules on the prepared weights and keeps the winners on disk.
Kernels are humming 0.1.19's; its own compiled code is kept in `$HUMMING_CACHE_DIR` (default `~/.humming/cache`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

from eprt.config import WeightFormat
from eprt.errors import ConfigError
from eprt.experts.humming.schedules import (
    ANY_ROWS,
    LAZY_STEP,
    MANY_ROWS,
    SCHEDULES_VERSION,
    SMALL_ROW_SCHEDULES,
    EvenRouting,
    Trial,
    neighbours,
    row_bucket,
    unique,
)
from eprt.experts.layouts import (
    TILE,
    pad_parts,
    spread_part_scale,
    spread_tensor_scale,
    stack_experts,
)
from eprt.experts.tuning import TuningCache, tuning_cache
from eprt.rounding import round_up
from eprt.support import Requirement, stream_number
from eprt.weights import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK, Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4

GemmType = Literal["grouped_contiguous", "grouped_masked"]

# humming's names of the checkpoint formats. FP8 with one scale a matrix is stored as equal block scales: exact, where
# a scale for each row would be rounded to bf16.
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
# FP8 activations, scaled as each weight format's kernels want them. NVFP4 x FP8 has no SM90 schedule in humming.
_GROUPS = {"a_dtype": "float8e4m3", "input_scale_group_size": FP8_BLOCK, "input_quant_mode": "dynamic_group"}
FP8_INPUT_SCHEMAS: dict[WeightFormat, dict[str, Any]] = {
    "mxfp4": {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_token"},
    "fp8_tensor": _GROUPS,
    "fp8_block": _GROUPS,
}

# int32 of stream-K state: at most 1.1 x (warpgroups of 128 threads that fit the device) are used, 2605 on 148 SMs.
LOCKS = 4096
LOCK_SETS = 8  # streams that can run one matrix at the same time

_KERNEL_ID = 2  # in a row of humming's tables: (rows from, to, kernel, multiprocessors)


@dataclass(frozen=True)
class GemmShape:
    """`rows` of each part x `cols` of a canonical matrix, and which of the two sides humming may leave unpadded.

    The intermediate size is padded here, each half on its own; H is padded by the kernel, so that tokens needn't be.
    """

    parts: int
    rows: int
    cols: int
    hidden_side: Literal["rows", "cols"]

    @property
    def padded(self) -> tuple[int, int]:
        """(rows of a part, columns), multiples of 128."""
        return round_up(self.rows, TILE), round_up(self.cols, TILE)


def expert_tensors(matrix: Matrix, bias: torch.Tensor | None, shape: GemmShape, channel_scale: bool) -> dict[str, Any]:
    """One expert (leading dimension 1) as humming's transform reads it: padded, in humming's dtypes.

    Args:
        channel_scale: NVFP4 only: gate and up have different second scales, so there is one for each row (bf16);
            else one for the matrix (float32, exact).
    """
    parts = shape.parts
    rows, cols = shape.padded
    if isinstance(matrix, (Mxfp4, Nvfp4)):
        block = MX_BLOCK if isinstance(matrix, Mxfp4) else NVFP4_BLOCK
        scales = pad_parts(matrix.scales, parts, rows, cols // block)
        tensors = {
            "weight": pad_parts(matrix.codes, parts, rows, cols // 2).view(torch.int32),
            "weight_scale": scales.view(torch.float8_e8m0fnu) if isinstance(matrix, Mxfp4) else scales,
        }
        if isinstance(matrix, Nvfp4):
            second = matrix.global_scale
            spread = spread_part_scale(second, rows).to(torch.bfloat16)
            tensors["weight_scale_2"] = spread if channel_scale else second[:, 0].contiguous()
    elif isinstance(matrix, (Fp8Block, Fp8Tensor)):
        grid = rows // FP8_BLOCK, cols // FP8_BLOCK
        scale = matrix.scale
        tensors = {
            "weight": pad_parts(matrix.data, parts, rows, cols).view(torch.int32),
            "weight_scale": pad_parts(scale, parts, *grid)
            if isinstance(matrix, Fp8Block)
            else spread_tensor_scale(scale, *grid),
        }
    else:
        raise ConfigError(f"humming takes {', '.join(WEIGHT_SCHEMAS)} weights, not {type(matrix).__name__}")
    if bias is not None:
        tensors["bias"] = pad_parts(bias, parts, rows).to(torch.bfloat16)
    return tensors


def needs_channel_scale(matrix: Matrix) -> bool:
    """Whether some expert's gate and up have different second-level scales."""
    return isinstance(matrix, Nvfp4) and bool((matrix.global_scale != matrix.global_scale[:, :1]).any())


class GroupedGemm:
    """`rows @ matrix[e].T + bias[e]` for rows grouped by expert.

    Args:
        matrix, bias: canonical, of all local experts, on any device; not kept.
        fp8_inputs: FP8 activations.
        batch_invariant: schedules whose sums don't depend on the batch.
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
    ) -> None:
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        self.device = device
        self.batch_invariant = batch_invariant
        self.num_experts = matrix.shape[0]
        rows, cols = shape.parts * shape.padded[0], shape.padded[1]
        channel = needs_channel_scale(matrix)
        weight = dict(WEIGHT_SCHEMAS[matrix.format[0]])
        if isinstance(matrix, Nvfp4):
            weight["weight_scale_2_type"] = "channel" if channel else "tensor"
        inputs = FP8_INPUT_SCHEMAS.get(matrix.format[0]) if fp8_inputs else None
        with torch.cuda.device(device):
            one = prepare_layer_config(
                shape_n=shape.rows if shape.hidden_side == "rows" else rows,
                shape_k=shape.cols if shape.hidden_side == "cols" else cols,
                weight_schema=HummingWeightSchema(**weight),
                input_schema=None if inputs is None else HummingInputSchema(**inputs),
                num_experts=1,
                pad_n_to_multiple=TILE,
                pad_k_to_multiple=TILE,
                has_bias=bias is not None,
                torch_dtype=torch.bfloat16,
                device=device,
            )

            def prepare(index: int) -> dict[str, torch.Tensor]:
                own = matrix.expert(index).map(lambda tensor: tensor.to(device))
                own_bias = None if bias is None else bias[index : index + 1].to(device)
                return transform_humming_tensors(one, expert_tensors(own, own_bias, shape, channel), True)

            self.tensors = stack_experts(self.num_experts, prepare)
            self.config = dataclasses.replace(one, num_experts=self.num_experts)
        self.out_features: int = self.config.shape_n - self.config.pad_shape_n
        self.in_features: int = self.config.shape_k - self.config.pad_shape_k
        self._tables: dict[tuple[GemmType, int], torch.Tensor] = {}
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
        """Rows of `out` outside the groups aren't written.

        Args:
            inputs: [rows, K] bf16, or e4m3 with `input_scale`.
            layout: `grouped_contiguous`: int64 [L + 1] offsets; `grouped_masked`: int32 [L] counts of L equal slabs.
            expected_rows: how many rows are probably in the groups; chooses the schedule, never the result.
        """
        self._launch(self._table(gemm_type, expected_rows), inputs, layout, expected_rows, out, input_scale)

    def _launch(
        self,
        table: torch.Tensor,
        inputs: torch.Tensor,
        layout: torch.Tensor,
        expected_rows: int,
        out: torch.Tensor,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        tensors = self.tensors
        # The library's operator itself: its Python wrapper costs as much host time as the launch.
        torch.ops.humming.launch_kernel.out(
            table,
            inputs,
            tensors["weight"],
            tensors["weight_scale"],
            tensors.get("weight_scale_2"),
            input_scale,
            None,  # second input scale
            None,  # zero point
            tensors.get("bias"),
            out,
            None,  # sorted ids, expert ids, padded rows: of `indexed` alone
            None,
            None,
            layout,
            self._stream_locks(),
            1,  # top-k: of `indexed` alone
            expected_rows,
            False,  # shapes and dtypes follow from this class: humming needn't check them
        )

    def _stream_locks(self) -> torch.Tensor:
        """Stream-K's counters, which two launches must not share at the same time; kernels leave them at zero."""
        stream = stream_number(self.device)
        found = self._lock_sets.get(stream)
        if found is None:
            found = self._lock_sets[stream] = self._locks[len(self._lock_sets) % LOCK_SETS]
        return found

    def is_compiled(self, gemm_type: GemmType, expected_rows: int) -> bool:
        """Whether a call with so many rows compiles nothing."""
        tables = self._tables
        return (gemm_type, ANY_ROWS) in tables or (gemm_type, row_bucket(expected_rows, LAZY_STEP)) in tables

    def compile(self, gemm_type: GemmType, expected_rows: int) -> None:
        """What a call does first if there was no warm-up: humming's own choice for about so many rows."""
        bucket = row_bucket(expected_rows, LAZY_STEP)
        schedule = self._heuristic(gemm_type, bucket)
        self._tables[gemm_type, bucket] = self._compile(gemm_type, [(0, ANY_ROWS, schedule)])

    def _table(self, gemm_type: GemmType, expected_rows: int) -> torch.Tensor:
        """humming's table (from, to, kernel, CTAs) that holds the schedule for so many rows."""
        table = self._tables.get((gemm_type, ANY_ROWS))
        if table is not None:
            return table
        if not self.is_compiled(gemm_type, expected_rows):
            self.compile(gemm_type, expected_rows)
        return self._tables[gemm_type, row_bucket(expected_rows, LAZY_STEP)]

    def _compile(self, gemm_type: GemmType, schedules: Sequence[tuple[int, int, dict[str, Any]]]) -> torch.Tensor:
        from humming.kernel.humming import HummingKernel

        with torch.cuda.device(self.device):
            return HummingKernel.prepare_kernels(
                self.config.to_str(), json.dumps(self._compute(gemm_type)), json.dumps(schedules), self.device
            )

    def _compute(self, gemm_type: GemmType) -> dict[str, Any]:
        return {"gemm_type": gemm_type, "use_batch_invariant": self.batch_invariant}

    def _heuristic(self, gemm_type: GemmType, rows: int) -> dict[str, Any]:
        from humming.tune import get_heuristics_config

        found = get_heuristics_config(self.config, shape_m=rows, device=self.device, **self._compute(gemm_type))
        if not isinstance(found, dict):
            raise ConfigError(f"humming gave {type(found).__name__} for a fixed row count: expected one schedule")
        return found

    def compile_candidates(self, routing: EvenRouting, gemm_types: Sequence[GemmType]) -> None:
        """Compile, many at once, what `warmup` will time and the disk doesn't know yet."""
        cache = self._cache()
        missing: dict[str, tuple[GemmType, dict[str, Any]]] = {
            json.dumps([gemm_type, schedule], sort_keys=True): (gemm_type, schedule)
            for gemm_type in gemm_types
            for rows in routing.buckets
            if not cache.path(self._problem(gemm_type, rows, routing)).exists()
            for schedule in self._candidates(gemm_type, rows)
        }
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            for job in [pool.submit(self._try_compile, *each) for each in missing.values()]:
                job.result()  # humming compiles each in a process of its own

    def warmup(self, routing: EvenRouting, gemm_types: Sequence[GemmType]) -> None:
        """Choose the schedule of every row count that this routing can bring, by timing or from disk."""
        upper = [*routing.buckets[:-1], ANY_ROWS]
        for gemm_type in gemm_types:
            chosen = [self._tuned(gemm_type, rows, routing) for rows in routing.buckets]
            rows = list(zip([0, *upper[:-1]], upper, chosen, strict=True))
            self._tables[gemm_type, ANY_ROWS] = self._compile(gemm_type, rows)

    def _cache(self) -> TuningCache:
        return tuning_cache("humming", humming_version(), torch.cuda.get_device_name(self.device))

    def _problem(self, gemm_type: GemmType, rows: int, routing: EvenRouting) -> dict[str, Any]:
        return {
            "layer": json.loads(self.config.to_str()),
            "rows": rows,
            "routing": (routing.top_k, routing.num_experts),
            "compute": self._compute(gemm_type),
            "schedules": SCHEDULES_VERSION,
        }

    def _tuned(self, gemm_type: GemmType, rows: int, routing: EvenRouting) -> dict[str, Any]:
        """The fastest schedule for so many rows, from disk if it was measured before."""
        cache, problem = self._cache(), self._problem(gemm_type, rows, routing)
        found = cache.load(problem, lambda stored: stored in _as_stored(self._candidates(gemm_type, rows)))
        if found is None:
            schedules = self._candidates(gemm_type, rows)
            tables = [self._try_compile(gemm_type, schedule) for schedule in schedules]
            trial = self._trial(gemm_type, rows, routing)
            timed = [(trial.microseconds(table), index) for index, table in enumerate(tables) if table is not None]
            found = schedules[min(timed)[1]]
            cache.store(problem, found)
        return found

    def _candidates(self, gemm_type: GemmType, rows: int) -> list[dict[str, Any]]:
        """humming's choice first; then its choices for fewer and more rows, what is next to it, and our own."""
        own = self._heuristic(gemm_type, rows)
        near = [max(1, rows // 4), max(1, rows // 2), rows * 2, rows * 4]
        others = [self._heuristic(gemm_type, count) for count in near]
        known = SMALL_ROW_SCHEDULES if rows <= MANY_ROWS * self.num_experts and not self.batch_invariant else ()
        return unique([own, *others, *neighbours(own, self.batch_invariant), *known])

    def _try_compile(self, gemm_type: GemmType, schedule: dict[str, Any]) -> torch.Tensor | None:
        """None for a schedule that humming refuses (its checks are assertions), can't compile, or couldn't launch."""
        from humming.ops import get_kernel_smem_size

        try:
            table = self._compile(gemm_type, [(0, ANY_ROWS, schedule)])
        except (AssertionError, ValueError, RuntimeError):
            return None
        most = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin
        return table if get_kernel_smem_size(int(table[_KERNEL_ID])) <= most else None

    def _trial(self, gemm_type: GemmType, rows: int, routing: EvenRouting) -> Trial:
        """Random tokens of such a routing, laid out as this kind of GEMM takes them."""
        layouts = routing.sample_offsets(rows, self.num_experts, self.device)
        if gemm_type == "grouped_contiguous":
            height = routing.tokens(rows, self.num_experts) * routing.top_k
            valid = torch.arange(height, device=self.device) < layouts[0][-1]
        else:
            layouts = [layout.diff().to(torch.int32) for layout in layouts]
            slab = max(1, *[int(counts.max()) for counts in layouts])
            height = self.num_experts * slab
            valid = (torch.arange(slab, device=self.device) < layouts[0][:, None]).flatten()
        inputs = torch.randn(height, self.in_features, device=self.device).to(torch.bfloat16)
        scale = None
        if self.config.has_input_scale:
            from humming.forward import may_quant_input

            inputs, scale = may_quant_input(self.config, inputs)
        out = torch.zeros(height, self.out_features, dtype=torch.bfloat16, device=self.device)

        def launch(table: torch.Tensor, layout: torch.Tensor) -> None:
            self._launch(table, inputs, layout, rows, out, scale)

        return Trial(launch, layouts, out, valid)


def _as_stored(schedules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they come back from JSON."""
    return json.loads(json.dumps(schedules))


def humming_version() -> str:
    return Requirement("humming", ("humming-kernels",), "0.1.19").version() or "unknown"
