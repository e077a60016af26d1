"""humming's elementwise kernel (`process_input`): activate, scatter and quantise rows, prepared once for each use.

`humming.ops.process_input` finds its kernel anew on every call, which costs the host more than the launch does.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from eprt.config import Activation

RowLayout = Literal["normal", "scatter", "grouped_mask"]


def activation_source(activation: Activation) -> tuple[str, str]:
    """Returns humming's name of the activation's shape, and its C++ expression of `a` (gate, or the only half) and `b`
    (up)."""
    if not activation.gated:
        return "unary", "a > 0.0f ? a * a : 0.0f"
    gate, up = "a", "b"
    alpha, beta, limit, cubic = activation.numbers
    if limit:
        gate, up = f"fminf(a, {limit!r}f)", f"fminf(fmaxf(b, -{limit!r}f), {limit!r}f)"
    if beta:
        up = f"({up} + {beta!r}f)"
    inner = f"({gate} + {cubic!r}f * {gate} * {gate} * {gate})" if cubic else gate
    return "binary_split", f"{gate} / (1.0f + __expf(-{alpha!r}f * {inner})) * {up}"


class RowKernel:
    """Turns bf16 rows into rows as the next GEMM reads them (bf16, or e4m3 with scales).

    Args:
        layer_config: humming's LayerConfig of that GEMM.
        width: its K, columns of a row that comes out.
        layout: `normal`: row for row, up to a count on the device; `scatter`: each row to its `scatter_width` places,
            negative ones dropped; `grouped_mask`: expert-major rows with counts.
    """

    def __init__(
        self,
        layer_config: Any,
        width: int,
        device: torch.device,
        layout: RowLayout,
        activation: Activation | None = None,
        scatter_width: int = 1,
    ) -> None:
        from humming.kernel.process_input import ProcessInputKernel
        from humming.tune.process_input import get_process_input_tuning_intervals

        with torch.cuda.device(device):
            self._problem: Any = _problem(layer_config, width, layout, activation, scatter_width)
            intervals = get_process_input_tuning_intervals(self._problem, False)
            self._table: torch.Tensor = ProcessInputKernel.prepare_kernels(self._problem, intervals, device)
        self._width: int = self._problem.output_row_size
        self._dtype: torch.dtype = self._problem.output_torch_dtype
        self._group_scale: bool = self._problem.quant_mode.has_group_scale
        self._token_scale: bool = self._problem.quant_mode.has_token_scale

    def __call__(
        self,
        rows: torch.Tensor,
        num_rows_out: int,
        *,
        expert_tokens: torch.Tensor | None = None,
        scatter_idx: torch.Tensor | None = None,
        num_valid_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (rows [num_rows_out, width], float32 scales or None). Rows that aren't valid are garbage."""
        problem, device = self._problem, rows.device
        out = torch.empty(num_rows_out, self._width, dtype=self._dtype, device=device)
        group = token = None
        if self._group_scale:
            shape = problem.get_group_scale_shape(num_rows_out)
            group = torch.empty(shape, dtype=problem.group_scale_torch_dtype, device=device)
        elif self._token_scale:
            token = torch.empty(num_rows_out, 1, dtype=torch.float32, device=device)
        torch.ops.humming.launch_process_input.default(
            self._table, rows, out, group, token, expert_tokens, scatter_idx, num_valid_tokens
        )
        return out, token if group is None else group


def _problem(layer_config: Any, width: int, layout: RowLayout, activation: Activation | None, scatter: int) -> Any:
    """Returns humming's description of the kernel; arguments as in `RowKernel`."""
    from humming import dtypes
    from humming.config import ActivationType, ProcessInputLayoutType, ProcessInputProblemConfig

    kind, source = ("none", None) if activation is None else activation_source(activation)
    quantises = bool(layer_config.has_input_scale)
    return ProcessInputProblemConfig(
        input_dtype=dtypes.DataType.from_any("bfloat16"),
        hidden_size=width,
        quant_mode=layer_config.input_quant_mode,
        quant_dtype=layer_config.a_dtype if quantises else None,
        quant_group_size=(layer_config.input_scale_group_size or None) if quantises else None,
        group_scale_dtype=layer_config.as_dtype if quantises else None,
        activation_type=ActivationType(kind),
        activation_impl=source,
        layout=ProcessInputLayoutType(layout),
        scatter_width=scatter,
    )
