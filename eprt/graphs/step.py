"""`StepGraphs`: a whole forward, captured once for each size, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eprt.dispatch import Dispatcher
from eprt.errors import ConfigError, EprtError, InputError, UsageError
from eprt.graphs.recording import GraphedLayer, Padding, PeerWatch, Pool, Recording, refusal
from eprt.kinds import require_kinds
from eprt.world import World
from eprt.world.agree import Header, agree_step, exchange, fingerprint_of
from eprt.world.collectives import Step

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_WARM_CALLS = 2  # before a capture: libraries choose algorithms and allocate workspaces in the first


@dataclass(frozen=True)
class _Bucket:
    """The recordings of one size: of forward, and of the step of a rank without tokens; and an output of no rows."""

    forward: Recording
    idle: Recording | None
    nothing: Any


class StepGraphs:
    """A caller's forward as one CUDA graph for each size of batch, replayed by all ranks in the same steps.

        graphs = StepGraphs(world, layers, forward, {"token": token[:1], "position": position[:1]}, idle=...)
        graphs.capture()                                         # on every rank, after World.warmup(*layers)
        logits = graphs(len(token), token=token, position=position)  # every rank, every step; 0: nothing to feed

    A call is a step of the World, or part of the one around it (`World.step`). All ranks agree on R and round it up to
    the next bucket (`World.buckets`). Then all replay, or, above the largest bucket, all run eagerly. A rank that runs
    its layers eagerly while others replay uses the same R, so both work together. A rank without tokens replays what
    `idle` did, at the same R. Padding rows name no expert: they are neither sent nor computed by an expert.

    On a CPU world nothing is captured; the same calls run eagerly on the same padded batches.

    Args:
        layers: the `ExpertParallelMoE` that forward calls, all of them.
        forward: called with `inputs` by name, each [rows, ...]; returns tensors, in any nesting of tuples, lists and
            dicts, each [rows, ...]. Everything else that it touches (weights, caches) must keep its address; the caller
            may change it in place between steps (`Router.refresh` for a router outside of the layers). It must not
            synchronise. `capture` calls it several times a bucket.
        inputs: the padding row of each input, [1, ...], on the world's device. Outside of the experts a padding row is
            computed like any other, so choose a harmless one (with a cache slot of its own).
        buckets: numbers of rows to capture, the same on every rank. Smaller sizes that other graphs of the World have
            by then are captured, too, because R may be rounded up to one of those.
        idle: what a rank without tokens does in place of forward, on all layers (`lambda: idle_step(layers)`). None:
            it replays forward on padding rows, attention included.

    Raises:
        ConfigError: no bucket, an input that isn't one row, what is no layer, or a layer that can't be captured, with
            every reason.
    """

    def __init__(
        self,
        world: World,
        layers: Iterable[GraphedLayer],
        forward: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        *,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        idle: Callable[[], object] | None = None,
    ) -> None:
        require_kinds(StepGraphs.__init__, locals())
        self._world, self._layers, self._forward, self._idle = world, list(layers), forward, idle
        _require_layers(self._layers, world.device)
        _require_buckets(buckets)
        self.buckets = tuple(sorted(set(buckets)))
        inputs = dict(sorted(inputs.items()))  # ranks may name them in orders of their own
        _require_rows(inputs, world.device)
        self._watch = PeerWatch(world, self._layers)
        self._routers = [layer.router for layer in self._layers if layer.router is not None]
        self._padding = Padding(world, self.buckets[-1])
        with torch.inference_mode(False):
            self._empty = {name: row.detach().clone() for name, row in inputs.items()}
            self._inputs = {name: row.repeat_interleave(self.buckets[-1], 0) for name, row in self._empty.items()}
        self._filled = 0  # rows of the inputs that hold what a call brought
        self._captured: dict[int, _Bucket] = {}

    def capture(self) -> None:
        """Records every bucket, the largest first, in one memory pool. Collective; again after
        `World.shrink`, by the ranks that are left.

        Raises:
            ConfigError: an output that isn't [rows, ...].
            WorldMismatch: the ranks have other buckets, numbers of layers or inputs.
            UsageError: inside a step, or a layer or the world is closed.
        """
        if self._world.current_step is not None:
            raise UsageError("StepGraphs.capture() inside a step: capture before it")
        self._compare()
        self._captured.clear()
        self._fill(0, {})  # the calls below would write what an earlier step brought once more, without its experts
        self._world.add_buckets(self.buckets)
        sizes = [rows for rows in self._world.buckets if rows <= self.buckets[-1]]
        pool = Pool.of(self._world.device)
        try:
            with torch.no_grad(), self._watch.capturing():
                self._captured = {rows: self._record(rows, pool) for rows in reversed(sizes)}
        finally:
            self._world.take_call_log()  # the calls of a recording are no step's, nor are those of one that broke off

    def __call__(self, num_tokens: int, **inputs: torch.Tensor) -> Any:
        """Makes one step of this rank. Collective, also for a rank without tokens.

        Args:
            num_tokens: T >= 0; inside a `World.step`, what it was opened with.
            inputs: [T, ...] of each; copied in stream order, so pinned host memory must stay as it is until the step
                has run. May be left out where T is 0.

        Returns:
            what forward returned, cut to [T, ...]: views that the next call overwrites. They are ready in stream order;
            `wait` waits for them on the host.

        Raises:
            InputError: inputs that aren't [T, ...] of the kind given at first.
            UsageError: before `capture`, after ranks were left out without a new one, or after a layer's `close`.
            RankLost, WorldMismatch: as `World.step`, and what an earlier step's kernels reported.
        """
        self._check(num_tokens, inputs)
        with torch.no_grad(), self._step(num_tokens) as step:
            bucket = self._captured.get(step.tokens_per_rank)
            if bucket is None:
                return self._eagerly(num_tokens, inputs, step.tokens_per_rank)
            self._watch.check()
            for router in self._routers:
                router.refresh()
            if num_tokens == 0 and bucket.idle is not None:
                bucket.idle.play()
                return bucket.nothing
            self._fill(num_tokens, inputs)
            output = bucket.forward.play()
            return _map(lambda tensor: tensor[:num_tokens], output)

    @property
    def stale(self) -> bool:
        """Returns whether a layer or the world was closed, or ranks were left out, since `capture`."""
        return self._watch.closed or self._watch.changed

    def wait(self) -> None:
        """Waits until this rank's GPU has done the step. Unlike torch's synchronize it hears of a lost rank meanwhile.

        Raises:
            RankLost, WorldMismatch: see `Dispatcher.check_peers`; RankLost after the World's timeout, too.
        """
        self._watch.wait()

    def _compare(self) -> None:
        """Raises WorldMismatch unless the ranks record the same."""
        self._world.require_open()
        settings = {
            "buckets": " ".join(map(str, self.buckets)),
            "layers": str(len(self._layers)),
            "inputs": ", ".join(f"{name} {row.dtype} {tuple(row.shape[1:])}" for name, row in self._empty.items()),
            "idle": "forward" if self._idle is None else "idle",
        }
        exchange(self._world, Header("warmup", -1, 0, fingerprint=fingerprint_of(settings), settings=settings))

    def _record(self, rows: int, pool: Pool | None) -> _Bucket:
        inputs = {name: tensor[:rows] for name, tensor in self._inputs.items()}

        def forward() -> Any:
            with _inside(self._world, rows), self._padding.applied(rows):
                return self._forward(**inputs)

        def idle() -> None:
            if self._idle is not None:
                with _inside(self._world, rows):
                    self._idle()

        self._padding.valid.write(0)
        output: Any = None
        for _ in range(_WARM_CALLS if pool is not None else 1):
            output = forward()
            idle()
        _require_outputs(output, rows)
        nothing = _map(lambda tensor: tensor.new_empty((0, *tensor.shape[1:])), output)
        del output
        if pool is not None:
            self._watch.wait()
        recorded = Recording.of(forward, pool, self._world)
        return _Bucket(recorded, None if self._idle is None else Recording.of(idle, pool, self._world), nothing)

    @contextmanager
    def _step(self, num_tokens: int) -> Iterator[Step]:
        """Yields the step around this call, or one of its own."""
        current = self._world.current_step
        if current is None:
            with self._world.step(num_tokens) as step:
                yield step
            return
        if num_tokens > (said := current.tokens[self._world.rank]):
            raise InputError(
                f"a call of {num_tokens} tokens in a step that this rank began with num_tokens={said}: say the largest "
                "number that a call gets in the step"
            )
        yield current

    def _fill(self, num_tokens: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copies the inputs of this call into the first rows, and empties rows that an earlier call filled."""
        for name, static in self._inputs.items():
            if num_tokens:
                static[:num_tokens].copy_(inputs[name], non_blocking=True)
            if num_tokens < self._filled:
                static[num_tokens : self._filled].copy_(self._empty[name].expand_as(static[num_tokens : self._filled]))
        self._filled = num_tokens
        self._padding.valid.write(num_tokens)

    def _eagerly(self, num_tokens: int, inputs: Mapping[str, torch.Tensor], tokens_per_rank: int) -> Any:
        """Makes a step over the largest bucket, or of a bucket that other graphs of the World have, as the caller
        would."""
        rows = min(self.buckets[0], tokens_per_rank)
        if num_tokens:
            return self._forward(**{name: x.to(self._world.device, non_blocking=True) for name, x in inputs.items()})
        if self._idle is not None:
            self._idle()
        else:
            self._fill(0, {})
            with _inside(self._world, tokens_per_rank), self._padding.applied(rows):
                self._forward(**{name: tensor[:rows] for name, tensor in self._inputs.items()})
        return self._captured[self.buckets[0]].nothing

    def _check(self, num_tokens: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises UsageError, InputError: the peers are told where this call begins the step."""
        try:
            self._require_ready()
            self._check_inputs(num_tokens, inputs)
        except EprtError as error:
            if self._world.current_step is None and not self._world.closed:
                agree_step(self._world, 0, error=error)
            raise

    def _require_ready(self) -> None:
        if not self._captured:
            raise UsageError("StepGraphs before capture(): call it on every rank, after World.warmup(*layers)")
        if self._watch.closed:
            raise UsageError("StepGraphs after its world or a layer was closed: make both again, then capture")
        if self._watch.changed:
            raise UsageError("ranks were left out since StepGraphs.capture(): call it again on the ranks that are left")
        if broken := next((layer.broken for layer in self._layers if layer.broken), ""):
            raise UsageError(broken)

    def _check_inputs(self, num_tokens: int, inputs: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(num_tokens, int) or num_tokens < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"num_tokens {num_tokens!r}: expected an int of at least 0")
        if num_tokens == 0 and not inputs:
            return
        if inputs.keys() != self._empty.keys():
            raise InputError(f"inputs are {', '.join(sorted(inputs)) or 'none'}: expected {', '.join(self._empty)}")
        for name, row in self._empty.items():
            tensor, expected = inputs[name], (num_tokens, *row.shape[1:])
            if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"input {name} is a {type(tensor).__name__}: expected a tensor {expected} {row.dtype}")
            if tuple(tensor.shape) != expected or tensor.dtype != row.dtype:
                raise InputError(
                    f"input {name} is {tuple(tensor.shape)} {tensor.dtype}: expected {expected} {row.dtype}"
                )


def _map(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    return pytree.tree_map(function, output)


@contextmanager
def _inside(world: World, rows: int) -> Iterator[None]:
    """Layers take `rows` as R, and up to as many tokens: in a recording no exchange can tell them."""
    before = world.current_step
    world.current_step = Step(world.step_number, (rows,) * world.size, ((),) * world.size)
    try:
        yield
    finally:
        world.current_step = before


def _require_layers(layers: Iterable[GraphedLayer], device: torch.device) -> None:
    for layer in layers:
        if not isinstance(getattr(layer, "dispatcher", None), Dispatcher):
            raise ConfigError(f"layers hold {type(layer).__name__}: expected each ExpertParallelMoE that forward calls")
    reasons = {reason: None for layer in layers if device.type == "cuda" and (reason := refusal(layer))}
    if reasons:
        raise ConfigError(
            f"these layers can't be captured: {'; '.join(reasons)}; `eprt explain` lists the pairs that can"
        )


def _require_buckets(buckets: Sequence[int]) -> None:
    if not len(buckets) or not all(type(rows) is int and rows > 0 for rows in buckets):
        raise ConfigError(f"buckets {list(buckets)}: expected at least one positive int")


def _require_rows(inputs: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, row in inputs.items():
        if row.dim() < 1 or row.shape[0] != 1 or row.device.type != device.type:
            raise ConfigError(
                f"input {name} is {tuple(row.shape)} on {row.device}: expected one row, [1, ...], on {device}"
            )
    if not inputs:
        raise ConfigError("StepGraphs without inputs: give forward at least one, [1, ...]")


def _require_outputs(output: Any, rows: int) -> None:
    tensors = pytree.tree_leaves(output)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1 or tensor.shape[0] != rows:
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(f"forward returned {found} for {rows} rows: expected tensors [{rows}, ...]")
    if not tensors:
        raise ConfigError("forward returned nothing: expected tensors [rows, ...]")
