"""What only FlashInfer and DeepEP have: jobs for the ranks of test_library_dispatchers.py, rehearsed in CI over the
stand-ins of tests/unit/test_gpu_jobs_on_stand_ins.py."""

from __future__ import annotations

import torch

from eprt.dispatch import DISPATCHERS
from eprt.quant import decode_payload, encode_payload
from eprt.ranks.launcher import RankContext
from eprt.tokens import TopK
from support.builders import caught
from support.jobs import dispatcher_jobs as jobs

ONE_STEP = 3e-2  # of a row whose largest number was quantised to the neighbouring FP8 code


def one_rank_drops_a_call(context: RankContext, pair: jobs.Pair) -> tuple[bool, int]:
    """Rank 1 closes its handle without combining: whether exactly the tokens that asked it are NaN, and wrong rows of
    the call that follows."""
    dispatcher = jobs.dispatcher_of(context, pair, 2048, 2, 32)
    generator = jobs.generator_of(dispatcher.world, 1)
    x, topk = jobs.batch(generator, 13, 2048, 2)
    sent = dispatcher.dispatch(x, topk, 16)
    honest = True
    if context.rank == 1:
        sent.handle.close()
    else:
        out = dispatcher.combine(jobs.stand_in(sent, dispatcher), sent.handle)
        honest = torch.equal(out.isnan().all(1), (topk.ids // (jobs.E // context.size) == 1).any(1))
    return honest, jobs.good_call(dispatcher, generator, 13, 16)


def no_memory(context: RankContext, pair: jobs.Pair) -> tuple[str, str, int]:
    """What a dispatch raises whose buffer doesn't fit the GPU, and wrong rows of the call that follows."""
    dispatcher = jobs.dispatcher_of(context, pair, 2048, 2, 16)
    huge = jobs.make(pair, context.world(), 8192, 2, {"flashinfer": 1 << 22, "deepep": 1024}[pair[0]])
    generator = jobs.generator_of(dispatcher.world, 2)
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 29), dtype=torch.uint8, device="cuda")
    said = caught(lambda: huge.dispatch(*jobs.batch(generator, 1, 8192, 2), 1))
    del hog
    torch.cuda.empty_cache()
    return *said, jobs.good_call(dispatcher, generator, 13, 16)


def overlapped(context: RankContext, H: int, K: int) -> tuple[str, int]:
    """DeepEP: other work between the sends and the arrival; what combine without wait raises, and wrong rows."""
    dispatcher = jobs.dispatcher_of(context, jobs.DEEPEP, H, K, 32)
    generator = jobs.generator_of(dispatcher.world, 3)
    wrong, early = 0, ""
    for T in (5, 0, 32, 17):
        x, topk = jobs.batch(generator, (T + context.rank) % 33, H, K)
        sent = dispatcher.dispatch(x, topk, 32, wait=False)
        early = caught(lambda sent=sent, x=x: dispatcher.combine(x, sent.handle))[1]
        busy = torch.randn(1024, 1024, device=generator.device)
        busy @= busy
        sent.handle.wait()
        sent.handle.wait()
        wrong += int(jobs.wrong_rows(dispatcher.combine(jobs.stand_in(sent, dispatcher), sent.handle), x, topk))
    return early, wrong


def quantised_by_deepep(context: RankContext, H: int, K: int, wait: bool) -> int:
    """FP8 tokens of any numbers: wrong rows, against this project's own encoding of the same tokens."""
    dispatcher = jobs.dispatcher_of(context, jobs.DEEPEP, H, K, 32, payload="fp8_block")
    generator = jobs.generator_of(dispatcher.world, 4)
    wrong = 0
    for T in (5, 0, 32, 17):
        _, topk = jobs.batch(generator, (T + context.rank) % 33, H, K)
        x = torch.randn(topk.ids.shape[0], H, device=generator.device, generator=generator).bfloat16()
        sent = dispatcher.dispatch(x, topk, 32, wait=wait)
        sent.handle.wait()
        sent.tokens.check()
        out = dispatcher.combine(jobs.stand_in(sent, dispatcher), sent.handle)
        wrong += int(far_rows(out, decode_payload(encode_payload(x, "fp8_block")), topk))
    return wrong


def far_rows(out: torch.Tensor, x: torch.Tensor, topk: TopK) -> torch.Tensor:
    """How many rows of `out`, less the experts' factors, are farther than ONE_STEP from x."""
    factor = jobs.factors(topk.ids, topk.weights)
    empty = (factor == 0).all(1)
    limit = torch.where(empty, 0.0, ONE_STEP * x.float().norm(dim=1))
    x = torch.where(empty[:, None], 0.0, x.float())
    error = (jobs.scaled(out.float(), 1 / torch.where(factor > 0, factor, 1.0)) - x).norm(dim=1)
    return (~(error <= limit)).sum()


def sizes(context: RankContext) -> list[str]:
    """Where our arithmetic of buffer sizes differs from the libraries'."""
    import deep_ep
    from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank

    from eprt.dispatch import deepep, flashinfer

    wrong: list[str] = []
    for W in (2, 4, 8, 63):
        for tokens in (1, 7, 64, 4096):
            ours = flashinfer.FlashInferGeometry(W, tokens, 5792, 5760)
            theirs = moe_a2a_get_workspace_size_per_rank(W, tokens, 5792, 5760)
            wrong += [f"flashinfer {ours}: {theirs}"] * (ours.buffer_bytes != theirs)
    for W, experts in ((2, 16), (4, 128), (8, 256)):
        for tokens in (1, 64, 1024):
            for hidden in DISPATCHERS["deepep"].hidden_sizes or ():
                theirs = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, W, experts)
                geometry = deepep.DeepEPGeometry(W, tokens, experts, hidden)
                wrong += [f"deepep {geometry}: {theirs}"] * (geometry.num_bytes != theirs)
    return wrong
