"""Generation with data-parallel attention and expert-parallel experts, by transformers' own loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from eprt.errors import ConfigError, EprtError, InputError
from eprt.integrations.transformers.agreement import ForwardAgreement, agreement_of, lockstep
from eprt.integrations.transformers.options import option_of
from eprt.json_files import shown
from eprt.rounding import round_up
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of

if TYPE_CHECKING:
    from eprt.integrations.transformers.decode import DecodeGraphs

logger = logging.getLogger("eprt")
_LENGTH_STEP = 128  # of the graphs' cache, so that a call of like length finds it
_DEFAULT_NEW_TOKENS = 20  # transformers'
_ONE_LIST = {"num_return_sequences": 1, "return_dict_in_generate": False}  # whatever the checkpoint's file says
_OF_ONE_BATCH = ("past_key_values", "cache", "negative_prompt_ids", "negative_prompt_attention_mask")
# Kinds of layers whose masks leave padding out, or that look at one token; two of them by older names. Others carry a
# state, or count blocks from the first token.
_MASKED = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "mlp"),
    *("attention", "deepseek_sparse_attention"),
}
OnToken = Callable[[int, int], None]


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    world: World | None = None,
    *,
    batch_size: int = 8,
    graphs: bool | Sequence[int] = False,
    on_token: OnToken | None = None,
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Continues this rank's prompts. Collective: every rank calls it, with as many prompts as it has, or none.

    Prompts are taken `batch_size` at a time, padded on the left; fewer where `RuntimeConfig.max_tokens_per_rank`
    doesn't hold them. A longer prompt passes through the layers in rounds; under `strict_capacity` it needs
    `prefill_chunk_size=` or a larger capacity. A rank whose prompts are finished computes for the others until all are;
    no rank waits for another's batch to end. Models whose attention carries state (linear attention, Mamba,
    convolutions, compressed keys) count padding as tokens: prompts of equal length share a batch there, which a warning
    says once.

    Args:
        model: one with expert-parallel layers: `parallelize(model, world)`, or `ep_implementation="eprt"`.
        prompts: token ids, each at least one. Ranks of one attention-TP group pass the same.
        world: checked to be the one that the model runs over; None takes the layers' own.
        graphs: replay decode steps from CUDA graphs (`StepGraphs`), captured in the first call for powers of two up to
            `batch_size`, or for these numbers of sequences; the same on every rank. The model keeps them, with a cache
            for `batch_size` sequences of the longest length so far. Prompts run eagerly. Where something can't be
            captured, a warning says why, and all runs eagerly.
        on_token: `on_token(prompt, token)` as each is chosen; `prompt` counts from 0. With one beam only.
        seeds: one for each prompt, for sampling with one beam: what is sampled for a prompt then depends on its seed
            alone, up to the rounding of its batch. None takes torch's random numbers of this process: seed ranks apart
            with `torch.manual_seed`, those of one attention-TP group alike.
        options: `model.generate`'s: max_new_tokens, do_sample, temperature, top_p, eos_token_id, generation_config,
            stop_strings (with tokenizer), ... What isn't given is the checkpoint's generation_config.json's.
            `max_length` and `min_length` count a batch's padding. `prefix_allowed_tokens_fn` gets the prompt's number
            among all that are given; logits processors and stopping criteria see the rows of a batch.

    Returns:
        for each prompt the tokens that follow it, up to and with the first end-of-sequence token, or the token that
        completes a stop string.

    Raises:
        InputError: an empty prompt, or a token that the vocabulary hasn't got; ConfigError: an option that can't work
            here. An error of one rank, `on_token`'s included, is raised on all; on GPUs, if it breaks a forward off, as
            a RankLost in its words once that rank has ended.
        CapacityError, RankLost, WorldMismatch: as the layers' forward.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper, whose generate is the model's own
    agreement = agreement_of(model)
    with ExitStack() as replaying, lockstep(model):
        _check(model, world, batch_size, options)
        if seeds is not None:
            _check_seeds(model, len(prompts), seeds, options)
        rows = [_checked(model, number, prompt) for number, prompt in enumerate(prompts)]
        layer = agreement.places[0].layer
        most = layer.dispatcher.capacity.max_tokens_per_rank * layer.world.parallel.attention_tp_size
        decode = None
        if graphs is not False:
            buckets = _buckets(graphs, min(batch_size, most))
            with _refusals(layer.world):
                length = _most_length(model, rows, options)
            decode = _decode_graphs(model, agreement, length, batch_size, buckets, options)
        if decode is not None:
            replaying.enter_context(decode.inside(model))  # until the last rank is done
        found: dict[int, list[int]] = {}
        reads_pads = bool(option_of(model, options, "no_repeat_ngram_size"))
        alike = _carries_state(model, agreement) or reads_pads
        batches = list(_batches(rows, 1 if _beams_end_anywhere(model, options) else batch_size, most, alike))
        held = next((name for name in _OF_ONE_BATCH if options.get(name) is not None), None)
        if len(batches) > 1 and held:
            raise ConfigError(f"{held} for {len(batches)} batches: it holds one; pass fewer prompts, or none")
        for numbers in batches:
            batch = {number: rows[number] for number in numbers}
            own = None if seeds is None else [seeds[number] for number in numbers]
            with _refusals(layer.world):
                found |= zip(numbers, _run(model, batch, own, on_token, options, decode), strict=True)
    return [tokens for _, tokens in sorted(found.items())]


def _carries_state(model: Any, agreement: ForwardAgreement) -> bool:
    """Returns whether a prompt's padding changes its answer; says so once for each model, on the first rank."""
    kinds: list[str] = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    if not (state := sorted(set(kinds) - _MASKED)):
        return False
    if agreement.world.rank == 0 and not agreement.told_of_state:
        logger.warning("batches hold prompts of equal length: %s would count padding as tokens", ", ".join(state))
    agreement.told_of_state = True
    return True


def _beams_end_anywhere(model: Any, options: dict[str, Any]) -> bool:
    """Returns whether beams may end without an end-of-sequence token: the fill behind them would pass for tokens."""
    criteria = any(option_of(model, options, name) for name in ("stop_strings", "stopping_criteria"))
    return criteria and (option_of(model, options, "num_beams") or 1) > 1


def _buckets(graphs: Any, largest: int) -> tuple[int, ...]:
    """Returns the numbers of sequences to capture graphs for. Raises ConfigError."""
    if graphs is True:
        return (*(1 << n for n in range(largest.bit_length()) if 1 << n < largest), largest)
    if not isinstance(graphs, Collection) or not graphs or not all(isinstance(size, int) for size in graphs):
        raise ConfigError(f"graphs={graphs!r}: expected True, False, or numbers of sequences such as (8, 32)")
    return tuple(sorted(set(graphs)))


def _decode_graphs(
    model: nn.Module,
    agreement: ForwardAgreement,
    length: int,
    batch_size: int,
    buckets: tuple[int, ...],
    options: dict[str, Any],
) -> DecodeGraphs | None:
    """Returns the model's graphs, those of an earlier call where they suffice. Collective.

    Returns None, with a warning, where the model can't have any.
    """
    from eprt.integrations.transformers.decode import DecodeGraphs, refusal

    kept = agreement.decode
    reason = kept if isinstance(kept, str) else refusal(model, agreement, options)
    settings = {"graphs": " ".join(map(str, buckets))}
    changed = isinstance(kept, DecodeGraphs) and not kept.follows(model)
    words = (round_up(length, _LENGTH_STEP), batch_size, int(bool(reason)), int(changed))
    header = Header("warmup", -1, 0, words=words, fingerprint=fingerprint_of(settings), settings=settings)
    _, by_rank = exchange(agreement.world, header)
    lengths, sizes, refused, differing = zip(*by_rank, strict=True)
    if not any(refused):
        if isinstance(kept, DecodeGraphs) and not any(differing) and kept.serves(buckets, max(sizes), max(lengths)):
            return kept
        kept = agreement.decode = None  # its memory is freed before the next capture
        try:
            agreement.decode = DecodeGraphs(model, agreement, buckets, max(sizes), max(lengths))
        except RuntimeError as error:  # of torch, on every rank: the model reads something on the host
            if isinstance(error, EprtError):
                raise
            reason = f"its decode step can't be captured: {error}"
            if not isinstance(error, torch.OutOfMemoryError):  # the next call may ask for less, or find more
                agreement.decode = reason
        else:
            return agreement.decode
    logger.warning("generate(graphs=...) runs without graphs: %s", reason or f"rank {refused.index(1)} says why")
    return None


def _most_length(model: nn.Module, rows: list[torch.Tensor], options: dict[str, Any]) -> int:
    """Returns the length of the longest sequence that `model.generate` can make; 1 without prompts."""
    if not rows:
        return 1
    prompt = max(map(len, rows))
    new, length = (option_of(model, options, name) for name in ("max_new_tokens", "max_length"))
    return prompt + int(new) if new is not None else max(prompt + _DEFAULT_NEW_TOKENS, int(length or 0))


def _run(
    model: Any,
    batch: dict[int, torch.Tensor],
    seeds: list[int] | None,
    on_token: OnToken | None,
    options: dict[str, Any],
    decode: DecodeGraphs | None,
) -> list[list[int]]:
    """Runs prompts [S], by number, together through `model.generate`, and returns each row's new tokens."""
    from eprt.integrations.transformers.sequences import SeededChoice, chosen_last

    device = agreement_of(model).world.device
    stops, pad = _special_tokens(model, options)
    rows = list(batch.values())
    longest = max(map(len, rows))
    # A row's own first token pads it: what counts the tokens of a row, as repetition_penalty does, finds no new one.
    ids = torch.stack([torch.cat((row[:1].expand(longest - len(row)), row)) for row in rows])
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    # lockstep keeps the ranks together
    given: dict[str, Any] = {**options, "pad_token_id": pad, **_ONE_LIST, "synced_gpus": False}
    lengths: dict[int, int] = {}
    if (option_of(model, options, "num_beams") or 1) == 1:  # else rows are beams, not sequences
        lengths = _record_ends(model, given, stops, ids.shape[1])
    if on_token is not None:
        given["streamer"] = _Streamer(list(batch), lengths, on_token)
    if (allowed := given.get("prefix_allowed_tokens_fn")) is not None:
        given["prefix_allowed_tokens_fn"] = _by_number(allowed, list(batch))
    if decode is not None:
        given |= {**decode.begin(len(ids)), "disable_compile": True}
    choice = SeededChoice(seeds, device) if seeds and option_of(model, options, "do_sample") else None
    with nullcontext() if choice is None else chosen_last(model, choice):
        out: torch.Tensor = model.generate(ids.to(device), attention_mask=mask.to(device), **given)
    after = [tokens[: lengths.get(row)] for row, tokens in enumerate(out[:, ids.shape[1] :].tolist())]
    return [tokens[: next((n for n, token in enumerate(tokens, 1) if token in stops), None)] for tokens in after]


def _by_number(allowed: Callable[[int, torch.Tensor], list[int]], numbers: list[int]) -> Callable[..., list[int]]:
    """Returns `allowed` as transformers calls it, which counts the rows of a batch."""

    def of_row(row: int, tokens: torch.Tensor) -> list[int]:
        return allowed(numbers[row], tokens)

    return of_row


@contextmanager
def _refusals(world: World) -> Iterator[None]:
    """Lets what options raise before the first forward, in transformers or here, be a ConfigError."""
    begun = world.step_number
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, EprtError) or world.step_number != begun:
            raise
        raise ConfigError(
            "an option of generate, or of the checkpoint's generation_config.json, that transformers refuses: "
            f"{type(error).__name__}: {error}"
        ) from error


def _record_ends(model: Any, given: dict[str, Any], stops: set[int], prompt_length: int) -> dict[int, int]:
    """Puts a record of where sequences end into what `model.generate` is given, and returns it."""
    from transformers import EosTokenCriteria

    from eprt.integrations.transformers.sequences import Ends, stops_at

    strings, tokenizer = option_of(model, given, "stop_strings"), given.get("tokenizer")
    if "assistant_tokenizer" not in given:  # the loop would hand it to the model's forward
        given.pop("tokenizer", None)
    criteria = [*(given.pop("stopping_criteria", None) or [])]
    criteria += [EosTokenCriteria(sorted(stops))] if stops else []
    if strings:
        criteria.append(stops_at(strings, tokenizer))
        given["stop_strings"] = None
    ends = Ends(criteria, prompt_length)
    given["stopping_criteria"] = [ends]
    return ends.lengths


def _special_tokens(model: Any, options: dict[str, Any]) -> tuple[set[int], int]:
    """Returns the tokens that end a sequence, and the one that pads short prompts and finished ones."""
    ends, pad = (option_of(model, options, name) for name in ("eos_token_id", "pad_token_id"))
    try:
        stops: set[int] = set() if ends is None else set(torch.as_tensor(ends, device="cpu").flatten().tolist())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"eos_token_id={shown(ends)}: expected a token id, or a list of them") from error
    known = [*([] if pad is None else [int(pad)]), *sorted(stops)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Files say -1 where there is none, and some name a token that was never added to the model.
    return stops, next((token for token in known if 0 <= token < vocabulary), 0)


def _batches(rows: list[torch.Tensor], size: int, most_tokens: int, alike: bool) -> Iterator[list[int]]:
    """Yields numbers of at most `size` rows, and no more tokens than the layers take at once, where that is possible:
    in order, or those of equal length together if `alike`."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda n: len(rows[n])) if alike else range(len(rows)):
        lengths = {len(rows[n]) for n in (*batch, number)}
        full = len(batch) == size or (len(batch) + 1) * max(lengths) > most_tokens
        if batch and (full or (alike and len(lengths) > 1)):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _checked(model: Any, number: int, prompt: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Returns the prompt as [S] int64 on the CPU. Raises InputError."""
    try:
        ids = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: an int beyond 64 bits
        raise InputError(f"prompt {number}: expected token ids: {error}") from error
    if ids.dim() != 1 or ids.numel() == 0 or ids.is_floating_point() or ids.is_complex():
        raise InputError(f"prompt {number} is {tuple(ids.shape)} {ids.dtype}: expected at least one token id")
    ids = ids.long()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        raise InputError(f"prompt {number} holds token ids {low} to {high}: expected 0 to {vocabulary - 1}")
    return ids


def _check(model: nn.Module, world: World | None, batch_size: Any, options: dict[str, Any]) -> None:
    if world is not None and world is not agreement_of(model).world:
        raise ConfigError("the model was parallelized over another World: pass that one, or none")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size {shown(batch_size)}: must be an int of at least 1")
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{type(model).__name__} has no generate: pass the model with its language-model head (of a wrapper, "
            "what it wraps)"
        )
    config = options.get("generation_config")
    for name, ordinary in _ONE_LIST.items():
        value = options.get(name, getattr(config, name, None))
        if value not in (None, ordinary):
            raise ConfigError(
                f"{name}={value!r}: generate returns one list of tokens a prompt; repeat the prompt instead"
            )
    if agreement_of(model).world.size > 1:
        _check_drafts(model, options)
    for name in ("synced_gpus", "streamer", "inputs", "input_ids", "attention_mask"):
        if name in options:
            raise ConfigError(f"{name} is set by generate itself (streaming: on_token)")


def _check_drafts(model: nn.Module, options: dict[str, Any]) -> None:
    """Raises ConfigError if drafts need ranks that compute for the model's own forwards."""
    if layers := option_of(model, options, "assistant_early_exit"):
        raise ConfigError(
            f"assistant_early_exit={layers}: drafts by a part of the layers leave the others without this rank; pass "
            "assistant_model or prompt_lookup_num_tokens"
        )
    assistant = options.get("assistant_model")
    if isinstance(assistant, nn.Module) and any("eprt_place" in module.__dict__ for module in assistant.modules()):
        raise ConfigError(
            f"assistant_model is a parallelized {type(assistant).__name__}, whose forwards need all ranks as well: "
            "pass one that each rank holds whole"
        )


def _check_seeds(model: nn.Module, count: int, seeds: Any, options: dict[str, Any]) -> None:
    fit = isinstance(seeds, Sequence) and all(isinstance(seed, int) and abs(seed) < 1 << 63 for seed in seeds)
    if not fit or len(seeds) != count:
        raise ConfigError(f"seeds {shown(seeds)} for {count} prompts: expected a list with an int of 64 bits for each")
    if (beams := option_of(model, options, "num_beams") or 1) > 1:
        raise ConfigError(
            f"seeds with num_beams={beams}: beams share their random numbers; pass num_beams=1, or torch.manual_seed "
            "instead of seeds"
        )


class _Streamer:
    """Receives the tokens of `model.generate`: the prompts first, then one token per row and step, or several of
    one row that was drafted for. `lengths` are new tokens of rows that have ended, which are only padded from then."""

    def __init__(self, numbers: list[int], lengths: Mapping[int, int], on_token: OnToken) -> None:
        self._numbers, self._lengths, self._on_token = numbers, lengths, on_token
        self._steps = -1  # the prompts' own

    def put(self, value: torch.Tensor) -> None:
        if self._steps < 0:
            self._steps = 0
            return
        for tokens in value.view(len(self._numbers), -1).T.tolist():
            self._steps += 1
            for row, token in enumerate(tokens):
                if self._steps <= self._lengths.get(row, self._steps):
                    self._on_token(self._numbers[row], token)

    def end(self) -> None:
        """Does nothing: no token is held back."""
