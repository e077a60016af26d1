"""Options of transformers' generate over two gloo ranks: seeds, stop strings, attention that carries state, float16."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

import torch
import transformers
from support.cases.model_recipes import RECIPES, VOCABULARY, make_model
from support.cases.text_model import FIRST, write_tokenizer
from support.jobs import generation_jobs as jobs

from eprt.errors import UsageError
from eprt.integrations.transformers import generate, parallelize
from eprt.integrations.transformers.agreement import ForwardAgreement, Place, agreement_of
from eprt.integrations.transformers.sequences import SeededChoice
from eprt.models.checkpoint import Checkpoint, _say_rounded
from eprt.ranks.launcher import WorldFailed, launch
from eprt.world import World

PROMPTS = [[5, 17, 33, 8], [41, 9, 60], [7, 3, 2, 9, 11], [30]]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("options") / "qwen3_moe"
    make_model(RECIPES["qwen3_moe"]).save_pretrained(path)
    write_tokenizer(path, VOCABULARY)
    return path


def run(pools, folder: Path, calls: list[dict], **more) -> list[list[dict]]:
    """Each rank's results of the calls."""
    return pools(2).run(jobs.several_calls, folder=str(folder), calls=calls, **more)


def test_what_is_sampled_depends_on_a_prompts_seed_alone(pools, folder: Path) -> None:
    """Not on its rank, nor on the rows beside it; warpers of the checkpoint's kind come before the choice."""
    sampled = GREEDY | {"do_sample": True, "temperature": 3.0, "top_k": 20, "repetition_penalty": 1.2}
    seeds = [11, 12, 13, -14]
    calls = [
        {"prompts": [PROMPTS[:3], PROMPTS[3:]], "seeds": [seeds[:3], seeds[3:]], **sampled},
        {"prompts": [PROMPTS[3:], PROMPTS[2::-1]], "seeds": [seeds[3:], seeds[2::-1]], "batch_size": 1, **sampled},
        {"prompts": [[PROMPTS[0]] * 8, []], "seeds": [list(range(8)), []], "batch_size": 8, **sampled},
        {"prompts": [PROMPTS[:1], []], "seeds": [[11], []], **GREEDY},
    ]
    first, second = run(pools, folder, calls)
    by_prompt = [*first[0]["tokens"], *second[0]["tokens"]]
    assert by_prompt == [*second[1]["tokens"][::-1], *first[1]["tokens"]]
    assert len({tuple(row) for row in first[2]["tokens"]}) > 4, "other seeds"
    assert first[3]["tokens"] == [jobs.alone(jobs.load(str(folder), torch.float32), PROMPTS[0], **GREEDY)]


@pytest.mark.parametrize("shares", [(3, 1), (4, 0)])
def test_ranks_batch_continuously_in_lockstep(pools, folder: Path, shares: tuple[int, int]) -> None:
    """One has fewer requests, or none."""
    options = GREEDY | {"eos_token_id": -1}  # no token
    model = jobs.load(str(folder), torch.float32)
    wanted = [jobs.alone(model, prompt, **GREEDY) for prompt in PROMPTS]
    prompts = [PROMPTS[: shares[0]], PROMPTS[shares[0] :]]
    found = pools(2).run(jobs.batch_continuously, folder=str(folder), prompts=prompts, options=options)
    assert found == [wanted[: shares[0]], wanted[shares[0] :]]


def test_a_forward_in_another_librarys_graph_is_refused_where_ranks_would_have_to_meet(monkeypatch) -> None:
    """As transformers' continuous batching captures by default on a GPU; its replays would meet nobody."""
    world = Mock(size=2, device=torch.device("cuda"), current_step=None)
    place = Place(world, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="use_cuda_graph=False"):
        ForwardAgreement([place], [place]).meet(3)
    world.step.assert_not_called()


def test_padding_is_no_token_that_penalties_know(pools, folder: Path) -> None:
    """Prompts of unequal length in one batch; the pad is what the shortest one would go on with."""
    model = jobs.load(str(folder), torch.float32)
    (pad,) = jobs.alone(model, PROMPTS[3], **GREEDY | {"max_new_tokens": 1})
    for penalty in ({"repetition_penalty": 1e6}, {"no_repeat_ngram_size": 1}):
        options = GREEDY | {"pad_token_id": pad} | penalty
        wanted = [jobs.alone(model, prompt, **options) for prompt in PROMPTS[2:]]
        found, _ = run(pools, folder, [{"prompts": [PROMPTS[2:], []], **options}])
        assert found[0]["tokens"] == wanted


def test_a_prompts_own_constraint_follows_it_into_its_batch(pools, folder: Path) -> None:
    model = jobs.load(str(folder), torch.float32)
    for beams in ({}, {"num_beams": 2}):
        wanted = [
            jobs.alone(
                model, prompt, prefix_allowed_tokens_fn=lambda _, ids, n=n: jobs.two_allowed(n, ids), **GREEDY | beams
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        call = {"prompts": [PROMPTS, []], "prefix_allowed_tokens_fn": jobs.two_allowed, **GREEDY, **beams}
        assert run(pools, folder, [call])[0][0]["tokens"] == wanted


def test_graphs_follow_weights_and_adapters_that_are_exchanged(folder: Path) -> None:
    """A captured graph reads the memory, and has the launches, of its capture. PEFT's layers have these fields."""
    model, other = (jobs.load(str(folder), torch.float32) for _ in range(2))
    adapted = model.model.layers[0].self_attn.q_proj
    adapted.active_adapters, adapted.disable_adapters, adapted.merged_adapters = ["mine"], False, []

    def weights() -> None:
        for each in (model, other):
            each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight.roll(1, 0))

    changes = [
        weights,
        lambda: setattr(adapted, "disable_adapters", True),
        lambda: adapted.merged_adapters.append("mine"),
    ]
    with World.from_env("cpu") as world:
        parallelize(model, world, jobs.RUNTIME)
        agreement, kept = agreement_of(model), []
        for change in (*changes, lambda: None):
            for _ in range(2):
                tokens = generate(model, PROMPTS[:1], graphs=True, **GREEDY)
                assert tokens == [jobs.alone(other, PROMPTS[0], **GREEDY)]
                kept.append(agreement.decode)
            change()
    assert [one is two for one, two in itertools.pairwise(kept)] == [True, False, True, False, True, False, True]


def test_nan_of_one_batch_is_not_in_the_next_one(folder: Path) -> None:
    """A mask leaves numbers out by weight 0, which NaN survives: that of a broken step stays in the cache of graphs."""
    model = jobs.load(str(folder), torch.float32)
    expected = [jobs.alone(model, PROMPTS[0], **GREEDY)]
    longer, embeddings = [7] * (len(PROMPTS[0]) + 8), model.get_input_embeddings().weight.data
    with World.from_env("cpu") as world:
        parallelize(model, world, jobs.RUNTIME)
        for _ in range(2):
            assert generate(model, PROMPTS[:1], graphs=True, **GREEDY) == expected
            kept = embeddings.clone()
            embeddings.fill_(torch.nan)
            generate(model, [longer], graphs=True, **GREEDY)
            embeddings.copy_(kept)


def test_the_choice_is_that_of_the_probabilities() -> None:
    """4,000 rows of the same scores: frequencies within five standard deviations, and nothing that is masked."""
    scores = torch.tensor([2.0, 1.0, 0.0, -torch.inf, -1.0])
    rows = 4000
    found = SeededChoice(range(rows), torch.device("cpu"))(torch.empty(0), scores.expand(rows, -1))
    assert ((found == 0).sum(1) == 1).all()
    assert (found.isneginf().sum(1) == len(scores) - 1).all()
    counts, p = (found == 0).sum(0), scores.softmax(0)
    assert ((counts - rows * p).abs() <= 5 * (rows * p * (1 - p)).sqrt()).all()


def test_stop_strings_end_answers(pools, folder: Path) -> None:
    """At other steps in one batch, as transformers ends each prompt alone; pads are neither returned nor streamed."""
    model, tokenizer = jobs.load(str(folder), torch.float32), transformers.AutoTokenizer.from_pretrained(folder)
    options = GREEDY | {"max_new_tokens": 10, "suppress_tokens": list(range(VOCABULARY - 1, VOCABULARY))}
    free = [jobs.alone(model, prompt, **options) for prompt in PROMPTS]
    options["stop_strings"] = [chr(FIRST + free[0][3]), "".join(chr(FIRST + token) for token in free[2][4:6])]
    wanted = [jobs.alone(model, prompt, tokenizer=tokenizer, **options) for prompt in PROMPTS]
    assert {len(row) for row in wanted} > {4}
    found = run(pools, folder, [{"prompts": [PROMPTS[:2], PROMPTS[2:]], **options}])
    assert [row for (call,) in found for row in call["tokens"]] == wanted
    assert [row for (call,) in found for row in call["streamed"]] == wanted


def test_what_ends_beams_and_what_is_drafted_are_the_loops_own(pools, folder: Path) -> None:
    """Beams that a stop string ends are filled up in a batch; a drafting loop chooses several tokens at once; -1 pads
    of old files are no tokens."""
    model, tokenizer = jobs.load(str(folder), torch.float32), transformers.AutoTokenizer.from_pretrained(folder)
    options = GREEDY | {"max_new_tokens": 12}
    free = [jobs.alone(model, prompt, **options) for prompt in PROMPTS]
    beams = options | {"num_beams": 2, "stop_strings": [chr(FIRST + free[0][3]), chr(FIRST + free[1][1])]}
    drafted = options | {"prompt_lookup_num_tokens": 3}
    padded = options | {"eos_token_id": [free[0][1], free[2][3]], "pad_token_id": -1}
    by_beams = [jobs.alone(model, prompt, tokenizer=tokenizer, **beams) for prompt in PROMPTS]
    ended = [jobs.alone(model, prompt, **padded) for prompt in PROMPTS]
    assert len({len(row) for row in by_beams}) > 1 < len({len(row) for row in ended})
    ways = [(by_beams, beams | {"batch_size": 4}), (free, drafted | {"batch_size": 1}), (ended, padded)]
    calls = [{"prompts": [PROMPTS, []], **given} for _, given in ways]
    found, _ = run(pools, folder, calls)
    assert [call["tokens"] for call in found] == [wanted for wanted, _ in ways]
    assert [call["streamed"] for call in found[1:]] == [free, ended]


def test_prompts_of_equal_length_share_a_batch_where_attention_carries_state(pools, tmp_path: Path) -> None:
    """MiniMax's linear attention counts padding as tokens. A warning says so, once."""
    make_model(RECIPES["minimax"]).save_pretrained(tmp_path)
    prompts = [[5], list(range(2, 40)), [9], list(range(40, 2, -1)), [12] * 7]
    model = jobs.load(str(tmp_path), torch.float32)
    wanted = [jobs.alone(model, prompt, **GREEDY) for prompt in prompts]
    call = {"prompts": [prompts[:4], prompts[4:]], **GREEDY}
    first, second = run(pools, tmp_path, [call, call])
    assert [[*one["tokens"], *other["tokens"]] for one, other in zip(first, second, strict=True)] == [wanted] * 2
    assert [call["streamed"] for call in first] == [wanted[:4]] * 2
    assert [call["said"] for call in first + second] == [
        ["batches hold prompts of equal length: linear_attention would count padding as tokens"], [], [], []
    ]  # fmt: skip


def test_a_float16_checkpoint_is_rounded_to_bfloat16_with_one_warning(pools, tmp_path: Path, caplog) -> None:
    """Experts and attention: as transformers' own model of the same files in bfloat16."""
    make_model(RECIPES["qwen3_moe"]).half().save_pretrained(tmp_path)
    plain = jobs.load(str(tmp_path), torch.bfloat16)
    _say_rounded.cache_clear()
    for _ in range(2):
        with Checkpoint(tmp_path) as source:
            for name, info in source.manifest.items():
                assert info.dtype == "BF16"
                if "experts" not in name:
                    assert torch.equal(source.read(name), plain.state_dict()[name])
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "weights in float16 are rounded to bfloat16, in which executors compute"
    ]
    call = {"prompts": [PROMPTS[:2], PROMPTS[2:]], **GREEDY, "max_new_tokens": 1}
    found = run(pools, tmp_path, [call], dtype="auto")
    assert {call["dtype"] for (call,) in found} == {"torch.bfloat16"}
    for prompt, (token,) in zip(PROMPTS, (row for (call,) in found for row in call["tokens"]), strict=True):
        logits = plain(torch.tensor([prompt])).logits[0, -1].float()
        # bf16's rounding on both sides may swap neighbours of the first place, no more.
        assert logits.max() - logits[token] <= 0.02 * (logits.max() - logits.min())


def test_memory_that_one_rank_lacks_in_a_forward_is_what_the_others_read(folder: Path) -> None:
    with pytest.raises(WorldFailed) as failure:
        launch(jobs.without_memory, 2, timeout_s=60.0, grace_s=6.0, folder=str(folder))
    (found,) = (report.raised for report in failure.value.reports if report.rank == 0)
    assert (found.error, found.lost_rank, found.why) == ("RankLost", 1, "raised"), str(failure.value)
    assert "rank 1 raised: OutOfMemoryError: 2 GiB more" in found.message
