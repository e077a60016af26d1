"""`LayerGraphs`: one layer's call as a CUDA graph for each small size, for callers that are eager themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from eprt.errors import ConfigError
from eprt.graphs.recording import GraphedLayer, Padding, PeerWatch, Pool, Recording, refusal
from eprt.rounding import next_power_of_2
from eprt.world import World

LARGEST = 128  # tokens a rank; from there on the experts take longer than the host needs to launch them one by one


class LayerGraphs:
    """Replays a layer for small R: the caller pays one launch and two copies.

    Ranks that replay and ranks that don't (another dtype, a routing of their own) use the same R, as it is rounded up
    to a bucket for both. On a CPU world the call itself is made, on a batch padded alike.

    Args:
        call: (hidden [R, H_model], R) -> [R, H_model]: the layer's eager call, routed by its own router.
        width: H_model.
        capacity: the largest R that one call of the layer may have.
        dtype: of the tokens that are replayed.

    Attributes:
        buckets: powers of two up to LARGEST and the capacity, or the capacity alone.

    Raises:
        ConfigError: the layer's pair can't be captured, with the reason.
    """

    def __init__(
        self,
        world: World,
        layer: GraphedLayer,
        call: Callable[[torch.Tensor, int], torch.Tensor],
        width: int,
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if world.device.type == "cuda" and (reason := refusal(layer)):
            raise ConfigError(f"RuntimeConfig.layer_graphs: {reason}; `eprt explain` lists the pairs that can")
        self._world, self._layer, self._call = world, layer, call
        self._watch = PeerWatch(world, [layer])
        largest = min(LARGEST, capacity)
        self.buckets = (*(1 << n for n in range(next_power_of_2(largest).bit_length()) if 1 << n < largest), largest)
        world.add_buckets(self.buckets)
        self._padding = Padding(world, largest)
        # Where graphs read their tokens: one for all layers of a width, which run one after the other.
        self._hidden = world.resource(
            ("layer graphs' tokens", largest, width, dtype),
            lambda: torch.zeros(largest, width, dtype=dtype, device=world.device),
        )
        self._width = width
        self._captured: dict[int, Recording] = {}

    def capture(self) -> None:
        """Records every bucket, the largest first. Collective, as the call is made before."""
        with torch.no_grad(), self._watch.capturing():
            pool = Pool.shared(self._world)  # now that no garbage holds the last graphs of an earlier one
            for rows in reversed(self.buckets):
                self._captured[rows] = self._record(rows, pool)

    def output_of(self, hidden: object, tokens_per_rank: object) -> torch.Tensor | None:
        """Does `replay` for a layer's own arguments; None also where the call will be refused."""
        step, width = self._world.current_step, self._width
        if tokens_per_rank is None and step is not None:
            tokens_per_rank = step.tokens_per_rank
        if type(tokens_per_rank) is not int or self._world.padding is not None:
            return None
        if not isinstance(hidden, torch.Tensor) or hidden.layout != torch.strided:
            return None
        if hidden.dim() < 2 or hidden.shape[-1] != width:
            return None
        x = hidden.reshape(-1, width)
        most = tokens_per_rank if step is None else step.tokens[self._world.rank]
        y = self.replay(x, tokens_per_rank) if x.shape[0] <= min(most, tokens_per_rank) else None
        return None if y is None else y.view(hidden.shape)

    def replay(self, hidden: torch.Tensor, tokens_per_rank: int) -> torch.Tensor | None:
        """Returns [T, H_model] of the caller's own for hidden [T, H_model] and an R that is rounded already. None: no
        graph fits such a call, so make it.

        Raises:
            RankLost, WorldMismatch: what is known of the peers.
        """
        recording, T = self._captured.get(tokens_per_rank), hidden.shape[0]
        on_gpu = self._world.device.type == "cuda"
        if recording is None or tokens_per_rank < T or (on_gpu and not self._fits(hidden)):
            return None
        self._padding.valid.write(T)
        if not on_gpu:
            padded = F.pad(hidden, (0, 0, 0, tokens_per_rank - T))
            with self._padding.applied(tokens_per_rank):
                return self._call(padded, tokens_per_rank)[:T].clone()
        self._watch.check()
        if self._layer.router is not None:
            self._layer.router.refresh()
        dispatcher = self._layer.dispatcher
        dispatcher._calls += 1  # as on ranks that make this call
        self._world.log_call(dispatcher.layer, dispatcher.fingerprint)
        if T:
            self._hidden[:T].copy_(hidden)
        return recording.play()[:T].clone()

    def _fits(self, hidden: torch.Tensor) -> bool:
        free = not (self._watch.closed or self._watch.changed or torch.cuda.is_current_stream_capturing())
        return free and hidden.dtype == self._hidden.dtype

    def _record(self, rows: int, pool: Pool | None) -> Recording:
        def call() -> torch.Tensor:
            with self._padding.applied(rows):
                return self._call(self._hidden[:rows], rows)

        if pool is not None:
            self._padding.valid.write(0)
            call()
            self._watch.wait()
        return Recording.of(call, pool, self._world)
