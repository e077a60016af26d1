"""Reads tensors of a checkpoint into canonical matrices, by the fields that `eprt.models.fields` lists.

Columns in activation order (GPTQ's `desc_act`, compressed-tensors' `actorder: group`) are sorted by group: GPTQ gives
groups to a matrix's inputs from the most to the least active one, `g_idx` says which column has which, and executors
multiply group by group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from eprt.config import MoEConfig, WeightFormat
from eprt.errors import CheckpointError, ConfigError
from eprt.json_files import shown
from eprt.models.checkpoint import Checkpoint
from eprt.models.fields import WHOLE_ROW, Field, Part, Stored, stored_as
from eprt.models.hf_config import flatten, model_dtype
from eprt.models.schemes import Scheme, scheme_of
from eprt.models.shards import Index
from eprt.placement import ExpertShard
from eprt.quant import decode
from eprt.quant.elements import pack_nibbles, unpack_nibbles
from eprt.rounding import ceil_div
from eprt.weights import FP8_BLOCK, ExpertWeights, Int4, Matrix


@dataclass(frozen=True)
class Location:
    """A place where a field of one part may be.

    It is a tensor of its own, or chunk `chunk` of `chunks` along the rows of entry `expert` of a stacked tensor.

    Attributes:
        transposed: the last two dimensions are [in, out].
        alternating: the rows are those of gate and up in turn.
        group: the columns are stored as [cols / group, group].
    """

    name: str
    expert: int | None = None
    chunk: int = 0
    chunks: int = 1
    transposed: bool = False
    alternating: bool = False
    group: int = 0


@dataclass(frozen=True)
class ExpertNames:
    """The names of a layer's expert tensors.

    Attributes:
        prefix: e.g. `model.layers.3.mlp.experts`.
        aliases: module names of each part where experts are apart: `<prefix>.<expert>.<alias>.weight`.
        stacked: of each part, where all experts are one tensor: (name, chunk, chunks), `<prefix>.<name>`.
        transposed: whether that tensor is [E, in, out].
    """

    prefix: str
    aliases: dict[Part, tuple[str, ...]]
    stacked: dict[Part, tuple[str, int, int]]
    transposed: bool = False

    def locate(self, expert: int, part: Part, field: Field) -> list[Location]:
        """Returns the places where a field may be, in the order in which they are tried."""
        apart = [
            Location(f"{self.prefix}.{expert}.{alias}.{suffix}")
            for suffix in field.suffixes
            for alias in self.aliases[part]
        ]
        name, chunk, chunks = self.stacked[part]
        for suffix in field.suffixes:
            # transformers shortens the names of scales, ModelOpt (Llama 4) doesn't.
            for ending in ("",) if suffix == "weight" else (f"_{suffix.removeprefix('weight_')}", f"_{suffix}"):
                stacked = f"{self.prefix}.{name}{ending}"
                apart.append(Location(stacked, expert, chunk, chunks, self.transposed))
        return list(dict.fromkeys(apart))  # suffixes may be shortened to one


def load_experts(
    checkpoint: Checkpoint, names: ExpertNames, config: MoEConfig, shard: ExpertShard, scheme: Scheme
) -> ExpertWeights:
    """Reads this rank's experts. Raises CheckpointError or ConfigError unless all of it is right."""
    stored, E = stored_as(scheme), config.num_experts
    for alias in names.aliases["down"]:
        extra = f"{names.prefix}.{E}.{alias}.{stored.fields[0].suffixes[0]}"
        if extra in checkpoint:
            raise CheckpointError(f"{checkpoint.where(extra)}: config.json says there are {E} experts")
    H, I = config.hidden_size, config.intermediate_size
    width = shard.slice_intermediate(I)
    first: tuple[Part, ...] = ("gate", "up") if config.activation.gated else ("up",)
    reader = MatrixReader(checkpoint, stored, names.locate, shard.experts, E)
    across, along = Extent((I, H), width, slice(0, H)), Extent((H, I), slice(0, H), width)
    gate_up, down = reader.read(first, across), reader.read(("down",), along)
    if isinstance(gate_up, Int4) and (inner := reader.orders(("down",), along)) is not None:
        _sort_rows(gate_up, inner[:, 0], len(first))
    weights = ExpertWeights(gate_up, down, hidden_order=reader.common_order(first, across))
    weights.check(config, shard)
    return weights


def require_whole_blocks(scheme: Scheme, config: MoEConfig, moe_tp_size: int, where: str) -> None:
    """Raises ConfigError, as reading the files would, where MoE-TP ranks or the matrices' own ends cut scale blocks."""
    H, I = config.hidden_size, config.intermediate_size
    for field in stored_as(scheme).fields if I % moe_tp_size == 0 else ():
        for block in (field.rows, field.cols) if field.rows else ():
            _entries(slice(0, H), H, block, where, rest=field.tiles)
            _entries(slice(0, I // moe_tp_size), I, block, where, rest=field.tiles)


@dataclass(frozen=True)
class Extent:
    """The part of a matrix that a rank reads: `rows` and `cols` of one of `size` rows and columns."""

    size: tuple[int, int]
    rows: slice
    cols: slice


@dataclass(frozen=True)
class MatrixReader:
    """Reads matrices of the local experts, one part of one expert at a time.

    Attributes:
        stored: the fields of the number format, as the config says it.
        locate: the places of a field of a part of an expert, in the order in which they are tried.
        experts: this rank's, in the order of its slots.
        num_experts: counts those of all ranks, which stacked tensors hold, and all of which must have an optional
            field.
    """

    checkpoint: Checkpoint
    stored: Stored
    locate: Callable[[int, Part, Field], list[Location]]
    experts: Sequence[int]
    num_experts: int
    _orders: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def read(self, parts: tuple[Part, ...], extent: Extent) -> Matrix:
        """Returns a canonical matrix of `parts`, each of the same extent, stacked along the rows.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or holds a bad scale.
            ConfigError: the extent cuts a scale block.
        """
        kind, fields = self.stored.kind, self.stored.fields
        self._check(parts, extent)
        orders = self.orders(parts, extent)
        present = [field for field in fields if not field.optional or self._exists(field, parts)]
        matrix = kind(**{field.name: self._field(field, parts, extent) for field in present})
        if orders is not None and isinstance(matrix, Int4):
            _sort_columns(matrix, orders)
        return matrix

    def orders(self, parts: tuple[Part, ...], extent: Extent) -> torch.Tensor | None:
        """Returns how columns are sorted by group: [L, parts, columns], or None where they lie in order.

        Raises:
            CheckpointError: groups that aren't all of one size.
            ConfigError: the extent takes some of the columns, which would be those of parts of groups.
        """
        if not self.stored.order:
            return None
        cols = extent.size[1]
        found = torch.stack([torch.stack([self._order(e, p, cols)[0] for p in parts]) for e in self.experts])
        if _is_sorted(found):
            return None
        if extent.cols != slice(0, cols):
            _, where = self._order(self.experts[0], parts[0], cols)
            raise ConfigError(
                f"{where}: columns in activation order can't be cut: use moe_tp_size 1, as expert parallelism"
            )
        return found

    def common_order(self, parts: tuple[Part, ...], extent: Extent) -> torch.Tensor | None:
        """Returns the order of columns that all experts of the layer share, or None where they lie in order.

        Raises:
            CheckpointError: the tensor of a local expert says another order than expert 0's.
        """
        if not self.stored.order:
            return None
        cols = extent.size[1]
        base, first = self._order(0, parts[0], cols)
        for expert, part in itertools.product(self.experts, parts):
            order, where = self._order(expert, part, cols)
            if not torch.equal(order, base):
                raise CheckpointError(
                    f"{where}: columns are in another activation order than those of {first}, and a layer's tokens are "
                    "sorted once for all of its experts; quantise with every token given to all experts, with desc_act "
                    "false, or with actorder static"
                )
        return None if _is_sorted(base) else base

    def _order(self, expert: int, part: Part, cols: int) -> tuple[torch.Tensor, str]:
        """Returns the order of one matrix's columns, and the head of a message about it."""
        name = self.checkpoint.first(*self._beside(expert, part, self.stored.order))
        where = self.checkpoint.where(name)
        if name not in self._orders:  # asked for by each matrix's columns, by the rows before it, and across experts
            groups = self.checkpoint.read(name, shape=(cols,), dtypes=(torch.int32,))
            self._orders[name] = _column_order(groups, self.stored.group, where)
        return self._orders[name], where

    def _beside(self, expert: int, part: Part, suffix: str) -> list[str]:
        """Returns the names that a tensor beside a part's matrix may have."""
        places = self.locate(expert, part, self.stored.fields[0])
        return [f"{place.name.rpartition('.')[0]}.{suffix}" for place in places if place.expert is None]

    def _check(self, parts: tuple[Part, ...], extent: Extent) -> None:
        """Reads what describes each of the local experts' matrices. Raises CheckpointError unless it is true."""
        for expert, part, claim in itertools.product(self.experts, parts, self.stored.claims):
            names = self._beside(expert, part, claim.suffix)
            if claim.optional and not any(name in self.checkpoint for name in names):
                continue
            name = self.checkpoint.first(*names)
            values = self.checkpoint.read(name, shape=claim.shape(*extent.size), dtypes=claim.dtypes)
            claim.require(values, self.checkpoint.where(name), extent.size)

    def _exists(self, field: Field, parts: tuple[Part, ...]) -> bool:
        """Tells whether all experts have an optional field. What only some have counts as read."""
        each = [self.locate(e, part, field) for e in range(self.num_experts) for part in parts]
        found = [next((place.name for place in places if place.name in self.checkpoint), "") for places in each]
        self.checkpoint.touched.update(filter(None, found))
        return all(found)

    def _field(self, field: Field, parts: tuple[Part, ...], extent: Extent) -> torch.Tensor:
        """Reads [L, rows of all parts, ...], or [L, parts] for a field of one number per part."""
        # All are found before memory is taken for all of them.
        places = [self._find(field, self.locate(e, part, field), extent) for e in self.experts for part in parts]
        pieces = (self._read(field, *place) for place in places)
        first = next(pieces)
        out = first.new_empty((len(self.experts), len(parts), *first.shape))
        for row, values in zip(out.flatten(0, 1), itertools.chain((first,), pieces), strict=True):
            row.copy_(values)
        return out if field.rows == 0 else out.flatten(1, 2)

    def _find(self, field: Field, places: list[Location], extent: Extent) -> tuple[Location, Index]:
        """Returns where a field of a part of an expert is: a tensor of the right shape and dtype, and an index."""
        name = self.checkpoint.first(*(place.name for place in places))
        where = self.checkpoint.where(name)
        place = next(place for place in places if place.name == name)
        if field.rows == 0:
            shape = self.checkpoint.require(name, dtypes=field.dtypes).shape
            if place.expert is not None and shape and shape[0] == prod(shape) == self.num_experts:
                return place, (place.expert,)
            if prod(shape) != 1:
                raise CheckpointError(f"{where} has shape {shown(shape)}: expected one number")
            return place, ()
        height, width = extent.size
        if place.chunks > 1 and height % field.rows:
            raise ConfigError(f"{where}: {height} rows of gate end inside a block of {field.rows} that up shares")
        rows = _entries(extent.rows, height, field.rows, where, rest=field.tiles)
        cols = _entries(extent.cols, width, field.cols, where, rest=field.tiles)
        entries = ceil_div(height, field.rows)
        index = slice(place.chunk * entries + rows.start, place.chunk * entries + rows.stop), cols
        shape = place.chunks * entries, 1 if field.cols == WHOLE_ROW else ceil_div(width, field.cols)
        if place.transposed or field.transposed:
            index, shape = index[::-1], shape[::-1]
        if place.group:
            grouped = _entries(extent.cols, width, field.cols * place.group, where)
            index, shape = (index[0], grouped), (shape[0], shape[1] // place.group, place.group)
        dims = len(self.checkpoint.manifest[name].shape)
        if place.expert is not None:
            index, shape = (place.expert, *index), (self.num_experts, *shape)
        # ModelOpt's scales are [rows], or [rows, 1, columns, 1] of blocks.
        elif dims == 1 and field.cols == WHOLE_ROW and not field.transposed:
            index, shape = index[:1], shape[:1]
        elif dims == 4 and field.rows == field.cols == FP8_BLOCK:
            index, shape = (index[0], 0, index[1], 0), (shape[0], 1, shape[1], 1)
        self.checkpoint.require(name, shape=shape, dtypes=field.dtypes)
        return place, index

    def _read(self, field: Field, place: Location, index: Index) -> torch.Tensor:
        where, values = self.checkpoint.where(place.name), self.checkpoint.read(place.name, index)
        if field.rows == 0:
            return field.accept(values.reshape(()), where)
        values = values.mT if place.transposed or field.transposed else values.reshape(len(values), -1)
        return field.accept(split_alternating(values) if place.alternating else values, where)


def split_alternating(rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Brings rows g0, u0, g1, u1, ... of dimension `dim` into the order [gate; up]."""
    return rows.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _entries(take: slice, size: int, block: int, where: str, *, rest: bool = False) -> slice:
    """Returns a field's entries for matrix rows or columns, of which a `rest` may be left over at the end."""
    if block == WHOLE_ROW:
        return slice(0, 1)
    if size % block and not rest:
        raise ConfigError(
            f"{where}: {size} rows or columns, by the config, are no multiple of its blocks of {block}; quantise with "
            "blocks that divide them"
        )
    if take.start % block or (take.stop % block and take.stop != size):
        raise ConfigError(
            f"{where}: [{take.start}, {take.stop}) of {size} cuts a scale block of {block}; choose a moe_tp_size that "
            f"keeps blocks whole"
        )
    return slice(take.start // block, ceil_div(take.stop, block))


def _column_order(groups: torch.Tensor, size: int, where: str) -> torch.Tensor:
    """Returns columns sorted by their group, int64. Raises CheckpointError unless each group has `size` of them (0: all
    are one group)."""
    cols = groups.numel()
    size = size or cols
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(cols, dtype=groups.dtype, device=groups.device) // size
    if not torch.equal(groups[order], expected):
        place = int((groups[order] != expected).nonzero()[0])
        found = int(groups[order][place])
        raise CheckpointError(
            f"{where}: {int((groups == found).sum())} columns are of group {found}: expected {size} in each of the "
            f"groups 0 to {(cols - 1) // size}"
        )
    return order


def _is_sorted(orders: torch.Tensor) -> bool:
    """Tells whether all orders [..., cols] leave columns where they are."""
    return bool((orders == torch.arange(orders.shape[-1], device=orders.device)).all())


def _sort_columns(matrix: Int4, orders: torch.Tensor) -> None:
    """Sorts, in place, the columns of each part of each expert by `orders` [L, parts, cols]. Scales stay: they have an
    entry for a group."""
    for parts, of_parts in zip(matrix.codes.unflatten(1, (orders.shape[1], -1)), orders, strict=True):
        for codes, order in zip(parts, of_parts, strict=True):
            codes.copy_(pack_nibbles(unpack_nibbles(codes)[:, order]))


def _sort_rows(matrix: Int4, orders: torch.Tensor, parts: int) -> None:
    """Sorts, in place, the rows of both parts of each expert by `orders` [L, rows of one part]: the outputs of gate and
    up, as the next matrix takes them."""
    for tensor in matrix.tensors().values():
        for of_expert, order in zip(tensor.unflatten(1, (parts, -1)), orders, strict=True):
            of_expert.copy_(of_expert[:, order])


def load_linear(checkpoint: Checkpoint, modules: tuple[str, ...], rows: int, cols: int) -> torch.Tensor:
    """Reads a dense layer's weight [rows, cols] in the model's dtype, decoded if it is packed.

    `modules` are the checkpoint's possible names for the layer. Raises CheckpointError.
    """
    suffixes = ("weight", "weight_packed", "qweight")
    module = checkpoint.first(*(f"{module}.{suffix}" for module in modules for suffix in suffixes)).rpartition(".")[0]
    scheme = _scheme_of_linear(checkpoint, module)

    def locate(expert: int, part: Part, field: Field) -> list[Location]:
        return [Location(f"{module}.{suffix}") for suffix in field.suffixes]

    reader = MatrixReader(checkpoint, stored_as(scheme), locate, experts=(0,), num_experts=1)
    whole = Extent((rows, cols), slice(0, rows), slice(0, cols))
    matrix = reader.read(("down",), whole)
    dense = decode(matrix, 1, model_dtype(flatten(checkpoint.config)))[0]
    orders = reader.orders(("down",), whole)
    return dense if orders is None else dense[:, orders[0, 0].argsort()]


def _scheme_of_linear(checkpoint: Checkpoint, module: str) -> Scheme:
    """Tells how a layer outside the routed experts is stored: by its own tensors where their names alone say it."""
    weight = checkpoint.manifest.get(f"{module}.weight")
    if weight is None or (weight.dtype == "F8_E4M3" and f"{module}.weight_scale" in checkpoint):
        found = scheme_of(flatten(checkpoint.config), (module,))
        if found.packer != "own":
            return found
    return Scheme(_format_of(checkpoint, module))


def _format_of(checkpoint: Checkpoint, module: str) -> WeightFormat:
    """Tells the number format of a layer by its own tensors. Raises CheckpointError."""
    name = checkpoint.first(f"{module}.weight")
    dtype = checkpoint.manifest[name].dtype
    suffixes = ("weight_scale", "weight_scale_2", "weight_scale_inv", "scale")
    present = {suffix for suffix in suffixes if f"{module}.{suffix}" in checkpoint}
    if dtype in ("BF16", "F32"):
        return "bf16" if dtype == "BF16" else "f32"
    if dtype in ("U8", "I8"):
        return "nvfp4" if present & {"weight_scale", "weight_scale_2"} else "mxfp4"
    if dtype == "F8_E4M3" and present & {"weight_scale_inv", "scale"}:
        blocks = checkpoint.manifest.get(f"{module}.weight_scale_inv")
        one = blocks is not None and prod(blocks.shape) == 1 and blocks.dtype != "F8_E8M0"
        return "fp8_tensor" if one else "fp8_block"
    if dtype == "F8_E4M3" and "weight_scale" in present:
        scale, rows = checkpoint.manifest[f"{module}.weight_scale"], checkpoint.manifest[name].shape[:1]
        if scale.dtype in ("U8", "F8_E8M0"):
            return "mxfp8"
        if prod(scale.shape) == 1:
            return "fp8_tensor"
        return "fp8_channel" if scale.shape in (rows, (*rows, 1)) else "fp8_block"
    beside = f"F8_E4M3, U8 or I8 with {', '.join(suffixes)} beside it"
    raise CheckpointError(f"{checkpoint.where(name)} has dtype {dtype}: expected BF16, F32, or {beside}")
