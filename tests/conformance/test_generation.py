"""Tokens out: greedy tokens of four gloo ranks, uneven prompts and a rank without any, are those of one process."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

import torch
from support.cases.model_recipes import RECIPES, known, make_config, make_model, scratch
from support.jobs import generation_jobs as jobs

from eprt.integrations.transformers.decode import model_refusal
from eprt.models import FAMILIES
from eprt.ranks.launcher import WorldFailed

NEW_TOKENS = 6
# Of each rank: none on the second; the last one runs out first.
PROMPTS: list[list[list[int]]] = [
    [[5, 17, 33, 8], [41, 9, 60], [12, 13, 14, 15, 16, 17, 18]],
    [],
    [[7, 3], [55, 54, 53]],
    [[30]],
]
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MODELS = [name for name, recipe in RECIPES.items() if known(recipe)]


@pytest.fixture(scope="module")
def pools(pools_of_this_file):
    """Each model that transformers itself loads over the ranks makes meshes, whose groups live as long as the ranks."""
    return pools_of_this_file


@functools.cache
def saved(name: str) -> str:
    """The family's checkpoint, in its own names, float32: so that a greedy choice isn't rounding's."""
    make_model(RECIPES[name]).save_pretrained(folder := str(scratch("generation") / name))
    return folder


@functools.cache
def expected(name: str) -> list[list[list[int]]]:
    model = jobs.load(saved(name), torch.float32)
    return [[jobs.alone(model, prompt, **OPTIONS) for prompt in prompts] for prompts in PROMPTS]


def check(found, name: str) -> None:
    for rank, (tokens, streamed) in enumerate(found):
        assert tokens == expected(name)[rank], f"rank {rank}"
        for number, row in enumerate(tokens):
            assert [token for prompt, token in streamed if prompt == number] == row
    assert len({token for rank in expected(name) for row in rank for token in row}) > 4, "tokens that tell nothing"


def run(pools, name: str, way: str, prompts=PROMPTS, size: int = 4, options: dict | None = None, **more):
    """Each rank's tokens, and those that were streamed."""
    return start(pools(size), jobs.continue_prompts, name, prompts, options, way=way, **more)


def start(pool, job, name: str, prompts, options: dict | None, **more):
    options = OPTIONS | (options or {})
    return pool.run(job, folder=saved(name), prompts=prompts, dtype=torch.float32, options=options, **more)


@pytest.mark.parametrize("name", [name for name in MODELS if name in FAMILIES])
def test_greedy_tokens_are_those_of_one_process(pools, name: str) -> None:
    """Loaded without experts; each family in the names and format in which it is published."""
    check(run(pools, name, "without_experts"), name)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_model_in_memory_gives_the_same_tokens(pools, name: str) -> None:
    check(run(pools, name, "parallelized"), name)


@pytest.mark.parametrize("name", MODELS)
def test_the_registered_implementation_gives_the_same_tokens(pools, name: str) -> None:
    """Data-parallel batches: the rank without a prompt runs the model too, whose dense weights FSDP gathers."""
    _require_registry(name)
    check(run(pools, name, "expert_parallel", fsdp_size=4), name)


def test_the_registered_implementation_begins_with_an_idle_rank(pools) -> None:
    """Layers are built in the first forward, where only the idle rank has the model's places together."""
    _require_registry("mixtral")
    folder = saved("mixtral")
    ids = torch.tensor([[5, 17, 33, 8]])
    expected = jobs.load(folder, torch.float32)(ids).logits
    for found in pools(2).run(jobs.idle_at_first, folder=folder, ids=ids, fsdp_size=2):
        assert len(found) == 1
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrapped", "more"),
    [(False, {}), (True, {}), (False, {"fsdp_mixed_precision": True})],
    ids=["bare", "wrapped", "mixed precision"],
)
def test_ranks_of_the_registered_implementation_call_transformers_own_loop_at_will(pools, wrapped: bool, more) -> None:
    """By itself the loop of a model that FSDP shards meets the other ranks' loops, and one rank has none. FSDP's mixed
    precision gives float32 experts bfloat16 tokens."""
    _require_registry("mixtral")
    found = start(pools(2), jobs.call_own_loop, "mixtral", PROMPTS, None, wrapped=wrapped, fsdp_size=2, **more)
    assert found == expected("mixtral")[:2]


def test_ranks_of_a_model_whose_layers_alone_fsdp_shards_call_its_loop_at_will(pools) -> None:
    found = start(pools(2), jobs.call_layers_sharded_alone, "mixtral", [PROMPTS[0], []], None)
    assert found == [expected("mixtral")[0], []]


def test_ranks_that_call_two_models_of_the_registered_implementation_at_once_are_told(pools) -> None:
    """Their layers were built at the first call, and numbered then: each rank's was the first."""
    _require_registry("mixtral")
    ids = torch.tensor([[5, 17, 33, 8]])
    for found in pools(2).run(jobs.crossed_models, folder=saved("mixtral"), ids=ids, fsdp_size=2):
        assert "WorldMismatch" in found
        assert "layer" in found


def test_a_tensor_parallel_group_shares_its_batch(pools) -> None:
    """Two groups of two ranks; each rank sends its slice of what its group holds. The second group has no prompt."""
    name = "qwen3_moe"
    _require_registry(name)
    found = run(pools, name, "expert_parallel", [PROMPTS[0], PROMPTS[0], [], []], tp_size=2, fsdp_size=2)
    assert [tokens for tokens, _ in found] == [expected(name)[0], expected(name)[0], [], []]


def test_ranks_that_end_at_any_time(pools) -> None:
    """Each prompt stops at its own end-of-sequence token, which is one of those that greedy decoding gives."""
    name = "qwen3_moe"
    rows = [row for rank in expected(name) for row in rank]
    end = rows[0][2]
    found = run(pools, name, "parallelized", options={"eos_token_id": end})
    for (tokens, streamed), wanted in zip(found, expected(name), strict=True):
        cut = [row[: row.index(end) + 1] if end in row else row for row in wanted]
        assert tokens == cut
        assert sorted(streamed) == sorted((n, token) for n, row in enumerate(cut) for token in row)
    assert len(found[0][0][0]) <= 3


def test_sampled_tokens_differ_by_seed_alone(pools) -> None:
    options = {"do_sample": True, "temperature": 2.0}
    first, again = (run(pools, "qwen3_moe", "parallelized", [[[5, 6]]] * 4, options=options) for _ in range(2))
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]
    assert len({tuple(tokens[0]) for tokens, _ in first}) > 1, "ranks are seeded apart"


def _require_registry(name: str) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers >= 5.23")
    pytest.importorskip("accelerate", reason="transformers' sharded loading asks for it")
    plan = make_config(RECIPES[name]).base_model_ep_plan or {}
    if "ep_dispatch_experts" not in plan.values():
        pytest.skip(f"transformers has no ep_dispatch_experts plan for {name}")


def replay(pools, name: str, options: dict | None = None, **more):
    return start(pools(4), jobs.replayed_and_eager, name, PROMPTS, options, **more)


# Of each rank, [sequences, tokens] of each forward of its host, at most two prompts at once. The prompts of the first
# step are more tokens than any bucket; then all take the bucket of the largest batch, the last rank with a row that
# holds nothing; then the first rank has another batch, while the others only replay the idle step.
FORWARDS = [[(2, 4), *[(2, 1)] * 5, (1, 7), *[(1, 1)] * 5], [], [(2, 3), *[(2, 1)] * 5], [(1, 1), *[(2, 1)] * 5]]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_decode_steps_from_graphs_give_the_same_tokens(pools, name: str) -> None:
    """Windows and sinks, plain and latent attention. Twice over one cache: the second call captures nothing, and finds
    the first one's keys behind its mask."""
    for rank, found in enumerate(replay(pools, name, calls=2)):
        assert found["warned"] == []
        assert found["buckets"] == [1, 2]
        first, second = found["replayed"]
        assert first["tokens"] == second["tokens"] == expected(name)[rank]
        assert len(first["forwards"]) == len(second["forwards"]) + 2, "one for each bucket"
        assert second["forwards"] == FORWARDS[rank]
        for scores, eager in zip(second["scores"], found["eager"]["scores"], strict=True):
            torch.testing.assert_close(torch.stack(scores), torch.stack(eager), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "sizes"), [(4, {"fsdp_size": 4}), (2, {"tp_size": 2})], ids=["fsdp", "tp"])
def test_the_registered_implementation_takes_graphs_where_it_can(pools, size: int, sizes: dict[str, int]) -> None:
    """FSDP's gathers keep it eager; ranks of one tensor-parallel group replay one batch, each with its slice of it."""
    name = "qwen3_moe"
    _require_registry(name)
    numbers = range(size) if "fsdp_size" in sizes else [0] * size
    prompts, graphs = [PROMPTS[number] for number in numbers], {"graphs": True}
    found = run(pools, name, "expert_parallel", prompts, size, graphs, replays="tp_size" in sizes, **sizes)
    assert [tokens for tokens, _ in found] == [expected(name)[number] for number in numbers]


def test_graphs_of_other_sizes_and_ends_at_any_time(pools) -> None:
    """A bucket wider than any batch, and one that batches don't fit into. The third rank's own two rows are what it
    runs while the first is at its second prompt already, or where no bucket holds them."""
    name = "qwen3_moe"
    end = expected(name)[0][0][2]
    cut = [[row[: row.index(end) + 1] if end in row else row for row in rows] for rows in expected(name)]
    for graphs, rows in (((4,), {2, 4}), ((1,), {1, 2})):
        found = replay(pools, name, {"eos_token_id": end}, graphs=graphs)
        assert [each["replayed"][0]["tokens"] for each in found] == cut
        steps = {rows for rows, tokens in found[2]["replayed"][0]["forwards"] if tokens == 1}
        assert steps == rows


@pytest.mark.parametrize(
    ("name", "options", "reason", "others"),
    [
        (
            "qwen3_next",
            {},
            "its cache has layers of linear_attention",
            ["batches hold prompts of equal length: linear_attention would count padding as tokens"],
        ),
        ("qwen3_moe", {"use_cache": False}, "use_cache=False needs a loop or a cache of its own", []),
    ],
)
def test_what_has_no_graphs_runs_without_and_says_why(
    pools, name: str, options: dict, reason: str, others: list[str]
) -> None:
    for rank, found in enumerate(replay(pools, name, options)):
        assert found["replayed"][0]["tokens"] == expected(name)[rank]
        said = others if rank == 0 else []
        assert found["warned"] == [f"generate(graphs=...) runs without graphs: {reason}", *said]
        assert found["buckets"] == []


def test_a_checkpoints_own_options_leave_graphs_out_beside_a_config_that_is_given() -> None:
    from transformers import GenerationConfig

    model, options = make_model(RECIPES["qwen3_moe"]), {"generation_config": GenerationConfig(max_new_tokens=2)}
    for name, value in (("num_beams", 2), ("cache_implementation", "static"), ("assistant_early_exit", 1)):
        assert not model_refusal(model, options)
        setattr(model.generation_config, name, value)
        assert model_refusal(model, options) == f"{name}={value!r} needs a loop or a cache of its own"
        setattr(model.generation_config, name, None)


@pytest.mark.parametrize(("breaks", "failed"), [(RuntimeError, 2), (torch.OutOfMemoryError, 1)])
def test_a_model_that_breaks_its_capture_runs_without(pools, breaks: type[RuntimeError], failed: int) -> None:
    """It is tried again where memory alone was short."""
    for rank, found in enumerate(replay(pools, "qwen3_moe", breaks=breaks, calls=2)):
        assert [each["tokens"] for each in found["replayed"]] == [expected("qwen3_moe")[rank]] * 2
        assert len(found["warned"]) == failed
        assert all("its decode step can't be captured: not permitted" in said for said in found["warned"])
        assert (found["buckets"] == []) == (failed == 2)


def test_ranks_that_ask_for_other_graphs_are_told(pools) -> None:
    with pytest.raises(WorldFailed, match=r"WorldMismatch: the ranks disagree about this call \(fingerprint, graphs\)"):
        replay(pools, "qwen3_moe", graphs=(2,), other_graphs=(4,))


@pytest.mark.timeout(400)
def test_a_compiled_model_may_run_more_often_on_one_rank(pools) -> None:
    """The ranks meet inside the operator that the compiler sees; the one that is done takes idle steps, uncompiled."""
    name, numbers = "qwen3_moe", [4, 1]
    prompts = [PROMPTS[0][0], PROMPTS[2][0]]
    found = pools(2).run(
        jobs.compiled_and_eager, folder=saved(name), prompts=prompts, new_tokens=numbers, timeout_s=380.0
    )
    wanted = [expected(name)[rank][0][:count] for rank, count in zip((0, 2), numbers, strict=True)]
    for way in ("eager", "lockstep", "wrapped", "generate"):
        assert [each[way] for each in found] == wanted, way
