"""Checks dispatch and combine bit for bit: computes what must arrive at a rank and what must come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from eprt.config import PayloadFormat
from eprt.conformance.cases import Batch
from eprt.errors import InputError
from eprt.experts.reference import decode_hidden
from eprt.placement import ExpertShard
from eprt.quant import encode_payload
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload

_SHOWN = 3
FP8_ROUNDING = 2.0**-4  # E4M3 keeps 4 bits
# A token at a rank: the exact bytes of its payload, and the (expert, weight) entries meant for this rank. In
# ExpertMajorTokens the one entry is the expert whose rows it is among, and no weight travels.
Arrival = tuple[bytes, tuple[tuple[int, float], ...]]


def travelling(hidden: torch.Tensor, payload: PayloadFormat | None) -> Payload:
    return Payload.plain(hidden) if payload is None else encode_payload(hidden, payload)


def wrong_arrivals(
    tokens: FlatTokens | ExpertMajorTokens, batches: Sequence[Batch], shard: ExpertShard, payload: PayloadFormat | None
) -> list[str]:
    """Describes what is wrong with the tokens that this rank received, given every rank's input; [] if each token that
    needs one of its experts arrived exactly once, bit for bit, with exactly this rank's entries and their weights."""
    try:
        tokens.check()
    except InputError as error:
        return [f"the tokens break their format: {error}"]
    if isinstance(tokens, FlatTokens):
        foreign = [e for e in tokens.ids.unique().tolist() if e != shard.num_experts and not _local(e, shard)]
        if foreign:
            return [f"ids {foreign} are neither of experts {shard.first_expert} to {shard.end_expert - 1} nor invalid"]
        got = Counter(_arrivals(_row_bytes(tokens.hidden), tokens.ids, tokens.weights, shard))
    else:
        got = Counter(_expert_major_arrivals(tokens, shard))
    expected = Counter(_due(batches, shard, payload, by_expert=isinstance(tokens, ExpertMajorTokens)))
    if got == expected:
        return []
    names = _names(batches, payload)
    return _list("missing", expected - got, names) + _list("not asked for", got - expected, names)


def scale_experts(
    tokens: FlatTokens | ExpertMajorTokens, shard: ExpertShard, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Stands for an executor: expert e returns its input times `scale[e]`. Rows that it need not write are NaN."""
    x = decode_hidden(tokens.hidden)
    out = torch.full_like(x, torch.nan)
    scale = torch.cat([scale, torch.zeros(1)]).to(x.device)
    if isinstance(tokens, ExpertMajorTokens):
        for index, count in enumerate(tokens.counts.tolist()):
            out[index, :count] = x[index, :count] * scale[shard.first_expert + index]
        return out.to(dtype)
    valid = tokens.ids < shard.num_experts
    factor = torch.where(valid, tokens.weights * scale[tokens.ids.long()], 0.0).sum(1)
    here = valid.any(1)
    out[here] = x[here] * factor[here, None]
    if tokens.every_row_read:
        out[~here] = 0.0
    return out.to(dtype)


def weighted_sums(batch: Batch, scale: torch.Tensor, payload: PayloadFormat | None) -> torch.Tensor:
    """Returns float64 [T, H], the result of combine after `scale_experts`: x * sum(weight * scale) of valid entries."""
    x = decode_hidden(travelling(batch.hidden, payload)).double()
    ids, weights = batch.topk.ids, batch.topk.weights
    scale = torch.cat([scale, torch.zeros(1)]).double()
    factor = torch.where(ids < scale.numel() - 1, weights.double() * scale[ids.long()], 0.0).sum(1)
    return x * factor[:, None]


def fp8_sums(batch: Batch, shard: ExpertShard) -> torch.Tensor:
    """Returns bf16 [T, H], the result of combine after plain bf16 experts (scale 1) where every rank's row travels as
    E4M3 (`RuntimeConfig.combine_payload`).

    It is no more than `FP8_ROUNDING` from the exact sums, as a token's rows have the signs of the token and lie between
    2^-6 and 448.
    """
    x, weights = batch.hidden.double(), batch.topk.weights.double()
    owners = batch.topk.ids // shard.num_local_experts
    total = torch.zeros_like(x)
    for owner in range(shard.num_experts // shard.num_local_experts):
        row = x * torch.where(owners == owner, weights, 0.0).sum(1, keepdim=True)
        total += round_to_e4m3(row.bfloat16().double())
    return total.bfloat16()


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Returns the nearest number that E4M3 has, float64, ties to even, saturating: three bits behind the leading one,
    steps of 2^-9 below 2^-6, 448 at most. Arithmetic alone, so that it shares nothing with a cast."""
    magnitude = x.abs().clamp(max=448.0)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=-6)
    step = torch.exp2((exponent - 3).double())
    return torch.copysign((magnitude / step).round() * step, x)


def _local(expert: int, shard: ExpertShard) -> bool:
    return shard.first_expert <= expert < shard.end_expert


def _row_bytes(payload: Payload) -> list[bytes]:
    """Returns each row's bytes, scale included; leading dimensions flattened."""
    parts = [p for p in (payload.data, payload.scale) if p is not None]
    raw = [p.detach().cpu().contiguous().view(torch.uint8).flatten(0, -2).numpy() for p in parts]
    return [b"".join(part[row].tobytes() for part in raw) for row in range(raw[0].shape[0])]


@lru_cache(1024)
def _travelling_rows(hidden: torch.Tensor, payload: PayloadFormat | None) -> list[bytes]:
    """Returns `_row_bytes` of what must travel; many checks have the same inputs."""
    return _row_bytes(travelling(hidden, payload))


def _arrivals(rows: list[bytes], ids: torch.Tensor, weights: torch.Tensor, shard: ExpertShard) -> Iterator[Arrival]:
    """Yields the rows that name an expert of the shard."""
    for row, experts, shares in zip(rows, ids.tolist(), weights.tolist(), strict=True):
        entries = tuple(sorted((e, w) for e, w in zip(experts, shares, strict=True) if _local(e, shard)))
        if entries:
            yield row, entries


def _expert_major_arrivals(tokens: ExpertMajorTokens, shard: ExpertShard) -> Iterator[Arrival]:
    raw, most = _row_bytes(tokens.hidden), tokens.hidden.data.shape[1]
    for index, count in enumerate(tokens.counts.tolist()):
        for row in range(count):
            yield raw[index * most + row], ((shard.first_expert + index, 1.0),)


def _due(
    batches: Sequence[Batch], shard: ExpertShard, payload: PayloadFormat | None, by_expert: bool
) -> Iterator[Arrival]:
    for batch in batches:
        rows, topk = _travelling_rows(batch.hidden, payload), batch.topk
        for row, entries in _arrivals(rows, topk.ids, topk.weights, shard):
            if by_expert:
                yield from ((row, ((expert, 1.0),)) for expert, _ in entries)
            else:
                yield row, entries


def _names(batches: Sequence[Batch], payload: PayloadFormat | None) -> dict[bytes, str]:
    """Maps a row's bytes to the token that they belong to."""
    return {
        raw: f"token {index} of rank {rank}"
        for rank, batch in enumerate(batches)
        for index, raw in enumerate(_travelling_rows(batch.hidden, payload))
    }


def _list(what: str, arrivals: Counter[Arrival], names: dict[bytes, str]) -> list[str]:
    if not arrivals:
        return []
    shown = list(arrivals)[:_SHOWN]
    some = [f"{names.get(row, 'a row that nobody sent')} for {dict(entries)}" for row, entries in shown]
    return [f"{arrivals.total()} tokens {what}: {', '.join(some)}"]
