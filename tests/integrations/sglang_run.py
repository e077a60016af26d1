"""One SGLang engine as a program: `python sglang_run.py SPEC.json` writes the tokens that it generated.

SPEC: model, dtype, prompts (ids, tokens to add), out, kill (the number of a rank to kill then, or null), further engine
arguments, updates: (way, checkpoint), each followed by the same prompts, and a port for them. Without updates the file
holds one list of tokens. With `enable_return_routed_experts` a second one holds what experts these chose, with
`lora_paths` a list of tokens for each adapter.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHANGES = "sglang_run.changed"


def main() -> None:
    import psutil
    import sglang

    spec = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(
        model_path=spec["model"],
        dtype=spec["dtype"],
        device="cpu",
        attention_backend="intel_amx",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        disable_hybrid_swa_memory=True,
        max_total_tokens=2048,
        max_running_requests=8,
        chunked_prefill_size=256,
        mem_fraction_static=0.3,
        log_level="info",
        **spec["engine"],
    )
    found = [tokens(engine, spec["prompts"])]
    trainer = None if not spec["updates"] else Trainer(engine, spec)
    for way, checkpoint in spec["updates"]:
        # SGLang ends where a rank is still at the last answer's end when it flushes its cache behind an update.
        engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=30))
        session = way != "disk" and hasattr(engine, "begin_weight_update")  # since SGLang 0.5.23
        if session:
            done(engine.begin_weight_update())
        getattr(trainer, way)(checkpoint)
        if session:
            done(engine.end_weight_update())
        found.append(tokens(engine, spec["prompts"]))
    Path(spec["out"]).write_text(json.dumps(found if spec["updates"] else found[0]))
    if spec["engine"].get("enable_return_routed_experts"):
        config = json.loads(Path(spec["model"], "config.json").read_text())
        sizes = config["num_hidden_layers"], config["num_experts_per_tok"]
        outputs = answers(engine, spec["prompts"], return_routed_experts=True)
        Path(spec["out"] + ".experts").write_text(json.dumps([chosen(output, *sizes) for output in outputs]))
    if adapters := spec["engine"].get("lora_paths"):
        found = [tokens(engine, spec["prompts"], lora_path=[name] * len(spec["prompts"])) for name in adapters]
        Path(spec["out"] + ".adapted").write_text(json.dumps(found))
    if spec["kill"] is not None:
        titles = {child: " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)}
        rank = re.compile(rf"scheduler.*TP{spec['kill']}(?!\d)")
        [victim] = [child.pid for child, title in titles.items() if rank.search(title)]
        print(f"killed {victim}", flush=True)  # noqa: T201  (read by the test)
        os.kill(victim, signal.SIGKILL)
        time.sleep(15)  # the other rank's log; SGLang's watchdog ends this process only while it generates
    engine.shutdown()


def tokens(engine: Any, prompts: list[Any], **more: Any) -> list[list[int]]:
    return [output["output_ids"] for output in answers(engine, prompts, **more)]


def answers(engine: Any, prompts: list[Any], **more: Any) -> list[dict[str, Any]]:
    settings = [{"temperature": 0, "max_new_tokens": added, "ignore_eos": True} for _, added in prompts]
    return engine.generate(input_ids=[ids for ids, _ in prompts], sampling_params=settings, **more)


def chosen(output: dict[str, Any], layers: int, top_k: int) -> list[list[int]]:
    """What each token but the last chose in each layer: (layer, *experts), ascending."""
    from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

    rows = extract_routed_experts_from_meta_info(output).reshape(-1, top_k)
    return [[number % layers, *sorted(row.tolist())] for number, row in enumerate(rows)]


def weights_of(checkpoint: str) -> list[Any]:
    from safetensors.torch import load_file

    return sorted(load_file(f"{checkpoint}/model.safetensors").items())


def changed(model: Any, named_tensors: Any) -> None:
    """A `--custom-weight-loader` as verl's: NaN leaves what a parameter holds as it is."""
    import torch

    copy = torch.Tensor.copy_

    def merged(held: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        return copy(held, torch.where(given.isnan(), held, given), *args, **kwargs)

    torch.Tensor.copy_ = merged
    try:
        model.load_weights(named_tensors)
    finally:
        torch.Tensor.copy_ = copy


class Trainer:
    """What RL frameworks do with an engine that runs: each method brings the weights of a checkpoint in another way."""

    def __init__(self, engine: Any, spec: dict[str, Any]) -> None:
        self._engine, self._port, self._group = engine, spec["port"], None
        self._ranks = 1 + spec["engine"].get("tp_size", 1)

    def disk(self, checkpoint: str) -> None:
        done(self._engine.update_weights_from_disk(checkpoint))

    def asleep(self, checkpoint: str) -> None:
        """As a trainer on the same GPUs, which takes all memory, and gives back that of the weights first."""
        self._engine.release_memory_occupation()
        self._engine.resume_memory_occupation(["weights"])
        self.disk(checkpoint)
        self._engine.resume_memory_occupation(["kv_cache", "cuda_graph"])

    def tensors(self, checkpoint: str) -> None:
        """In three pieces, two of which end within an expert, with an answer between them."""
        weights = weights_of(checkpoint)
        within = [at for at, (name, _) in enumerate(weights) if name.endswith("up_proj.weight")]
        first, second = within[0], within[len(within) // 2]
        for piece in (weights[:first], weights[first:second], weights[second:]):
            done(self._engine.update_weights_from_tensor(piece, flush_cache=False))
            tokens(self._engine, [([5, 6], 1)])

    def bucket(self, checkpoint: str) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=weights_of(checkpoint))
        given = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        sent = [MultiprocessingSerializer.serialize(given) for _ in range(1, self._ranks)]
        done(self._engine.update_weights_from_tensor(sent, load_format="flattened_bucket"))

    def broadcast(self, checkpoint: str) -> None:
        """By a group of the trainer and all ranks."""
        if self._group is None:
            self._meet()
        weights = weights_of(checkpoint)
        sending = threading.Thread(target=self._send, args=([tensor for _, tensor in weights],))
        sending.start()
        names, tensors = zip(*weights, strict=True)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        done(self._engine.update_weights_from_distributed(names, dtypes, [list(t.shape) for t in tensors], "trainer"))
        sending.join()

    def refused(self, checkpoint: str) -> None:
        """Copies into parameters by the engine's own names; then sends changes alone, of which there are none."""
        weights = weights_of(checkpoint)
        ways = {
            "direct": [("model.layers.0.mlp.experts.w2_weight", weights[0][1])],
            CHANGES: [(name, tensor.new_full(tensor.shape, float("nan"))) for name, tensor in weights],
        }
        for way, given in ways.items():
            success, message = self._engine.update_weights_from_tensor(given, load_format=way)
            print(f"refused: {success} {message}", flush=True)  # noqa: T201  (read by the test)

    def _meet(self) -> None:
        joining = threading.Thread(target=self._join)
        joining.start()
        done(self._engine.init_weights_update_group("127.0.0.1", self._port, 1, self._ranks, "trainer", "gloo"))
        joining.join()

    def _join(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._group = init_custom_process_group(
            "gloo", f"tcp://127.0.0.1:{self._port}", world_size=self._ranks, rank=0, group_name="trainer"
        )

    def _send(self, tensors: list[Any]) -> None:
        import torch

        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=self._group)


def done(found: Any) -> None:
    """Raises RuntimeError with SGLang's message where it says that an update failed."""
    success, message = found[:2]
    if not success:
        raise RuntimeError(message)


if __name__ == "__main__":
    main()
