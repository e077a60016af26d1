"""Tiny models of many families, packed by llm-compressor or ModelOpt as users do: eprt reads the numbers that went in.

    PYTHONPATH=. python benchmarks/packers.py llmcompressor --json FILE
    PYTHONPATH=. python benchmarks/packers.py modelopt --json FILE

Needs no GPU and no network, but the package (`pip install llmcompressor`, `nvidia-modelopt[hf]`) with the transformers
that it asks for. ModelOpt packs what its settings name; llm-compressor leaves `PLAIN` alone here, as attention of these
models is narrower than a group. A checkpoint fails if the experts that eprt reads of it are further from the plain
ones, in norm, than `LIMITS`: a third above what the format's own rounding takes of normally distributed weights. Gate
and up swapped are 1.4 away.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from duel import say
from transformers import AutoModelForCausalLM

from eprt.bench.report import Report
from eprt.errors import EprtError
from eprt.experts.reference import decode_matrix
from eprt.models import family_for, load_layer
from eprt.models.checkpoint import Checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cases.model_recipes import RECIPES, VOCABULARY, known, make_model

WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
PLAIN = [
    "lm_head",
    *(f"re:.*{name}.*" for name in (r"\.gate$", r"\.wg$", "router", "shared_expert_gate", "attn", "conv")),
]
LIMITS = {"4": 0.15, "8": 0.035}  # by the bits of a format: E4M3 0.027; INT4 by 128 0.103, NVFP4 0.095, MXFP4 0.115
LLM_COMPRESSOR = {
    **{name: "4" for name in ("W4A16", "W4A16_ASYM", "NVFP4A16", "NVFP4", "MXFP4A16")},
    **{name: "8" for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16")},
}
MODELOPT = {
    **{name: "4" for name in ("NVFP4_DEFAULT_CFG", "NVFP4_MLP_ONLY_CFG")},
    **{name: "8" for name in ("FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")},
    "MXFP8_DEFAULT_CFG": "8",
}


def batches() -> torch.Tensor:
    """Returns [4, 1, 16] ids to calibrate with."""
    return torch.randint(3, VOCABULARY, (4, 1, 16), generator=torch.Generator().manual_seed(0))


def by_llm_compressor(plain: Path, packed: Path, scheme: str) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.utils import load_context
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t0")
    ids = batches()[:, 0]
    rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    calibrated = {"dataset": Dataset.from_dict(rows), "processor": tokenizer, "num_calibration_samples": len(ids)}
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=PLAIN)
    oneshot(model=model, recipe=recipe, **(calibrated if scheme in ("FP8", "NVFP4") else {}))
    model.save_pretrained(packed, save_compressed=True)


def by_modelopt(plain: Path, packed: Path, config: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval()
    settings = copy.deepcopy(getattr(mtq, config))
    export_hf_checkpoint(mtq.quantize(model, settings, lambda m: [m(ids) for ids in batches()]), export_dir=packed)


PACKERS: dict[str, tuple[str, dict[str, str], Callable[[Path, Path, str], None]]] = {
    "llmcompressor": ("llmcompressor", LLM_COMPRESSOR, by_llm_compressor),
    "modelopt": ("nvidia-modelopt", MODELOPT, by_modelopt),
}


def make(name: str, folder: Path) -> None:
    """Saves a model of a family, 256 wide: whole blocks of every format."""
    fields = RECIPES[name].fields
    wide = {field: 256 for field in WIDTHS if isinstance(fields.get(field), int)}
    make_model(replace(RECIPES[name], fields=fields | wide), torch.bfloat16).save_pretrained(folder)


def distance(plain: Path, packed: Path) -> float:
    """Returns the largest distance of a matrix of all experts from the plain one, as a part of its norm."""
    worst = 0.0
    with Checkpoint(plain) as checkpoint:
        layers = family_for(checkpoint.config).moe_layers(checkpoint.config)
    for layer in layers:
        want, found = (load_layer(folder, layer) for folder in (plain, packed))
        for name, parts in (("gate_up", want.config.activation.parts), ("down", 1)):
            a, b = (decode_matrix(getattr(each.experts, name), parts) for each in (want, found))
            worst = max(worst, float((a - b).norm() / a.norm()))
    return worst


def tried(
    pack: Callable[[Path, Path, str], None], plain: Path, packed: Path, scheme: str, limit: float
) -> dict[str, Any]:
    try:
        pack(plain, packed, scheme)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return {"not_packed": f"{type(error).__name__}: {error}"[:160]}
    try:
        found = distance(plain, packed)
    except EprtError as error:
        return {"refused": f"{type(error).__name__}: {error}".replace(str(packed), "")[:300]}
    return {"distance": round(found, 4)} if found <= limit else {"wrong": round(found, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packer", choices=PACKERS)
    parser.add_argument(
        "--families", nargs="+", choices=RECIPES, default=[name for name in RECIPES if name != "gpt_oss"]
    )
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    package, schemes, pack = PACKERS[a.packer]
    command = f"PYTHONPATH=. python benchmarks/packers.py {a.packer} --json FILE"
    report = Report("packers", [], notes=[f"{package} {version(package)}"], command=command)
    with tempfile.TemporaryDirectory() as scratch:
        for name in filter(lambda name: known(RECIPES[name]), a.families):
            make(name, plain := Path(scratch, name))
            for scheme, bits in schemes.items():
                found = tried(pack, plain, Path(scratch, f"{name}-{scheme}"), scheme, LIMITS[bits])
                report.rows.append({"family": name, "scheme": scheme, **found})
                say(json.dumps(report.rows[-1]))
    if a.json:
        report.write(a.json)
    return int(any("wrong" in row for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
