"""Copies into several peers' memory at once, as fast as the link takes the stores."""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # words of 8 bytes that a CTA moves at once


@triton.jit
def _push_kernel(source, places, words, PEERS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies by CTAs: CTA c serves peer c % PEERS."""
    pid = tl.program_id(0)
    place = tl.multiple_of(tl.load(places + pid % PEERS).to(tl.pointer_type(tl.int64)), 16)
    for start in range(pid // PEERS * BLOCK, words, tl.num_programs(0) // PEERS * BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(place + word, tl.load(source + word, mask=word < words), mask=word < words)


def push(source: torch.Tensor, places: torch.Tensor, ctas_per_peer: int) -> None:
    """Copies source [n] int64 to each of the addresses in places [P] int64, 16-byte aligned."""
    peers = places.shape[0]
    _push_kernel[(peers * ctas_per_peer,)](source, places, source.shape[0], PEERS=peers, BLOCK=_BLOCK, num_warps=8)
