"""One SGLang engine as a program: `python sglang_run.py SPEC.json` writes the tokens that it generated.

SPEC: model, dtype, prompts (ids, tokens to add), out, kill (the number of a rank to kill then, or null), and further
engine arguments.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path


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
    outputs = engine.generate(
        input_ids=[ids for ids, _ in spec["prompts"]],
        sampling_params=[
            {"temperature": 0, "max_new_tokens": added, "ignore_eos": True} for _, added in spec["prompts"]
        ],
    )
    Path(spec["out"]).write_text(json.dumps([output["output_ids"] for output in outputs]))
    if spec["kill"] is not None:
        titles = {child: " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)}
        rank = re.compile(rf"scheduler.*TP{spec['kill']}(?!\d)")
        [victim] = [child.pid for child, title in titles.items() if rank.search(title)]
        print(f"killed {victim}", flush=True)  # noqa: T201  (read by the test)
        os.kill(victim, signal.SIGKILL)
        time.sleep(15)  # the other rank's log; SGLang's watchdog ends this process only while it generates
    engine.shutdown()


if __name__ == "__main__":
    main()
