"""Job of test_compile.py: a tiny transformers model over the ranks, compiled whole and beside it eager."""

from __future__ import annotations

import gc

import torch
from torch._inductor import config as inductor

from eprt import compiled
from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.integrations.transformers import parallelize
from eprt.ranks.launcher import RankContext
from support.builders import said
from support.cases.model_recipes import RECIPES, make_model
from support.jobs.integration_jobs import PROMPTS
from support.jobs.layer_jobs import make_layer


def compare_compiled(context: RankContext, name: str, dtype: torch.dtype) -> tuple[float, str]:
    """Error of the compiled logits against the eager ones, parameters wanting gradients as they do by default, and what
    is said to a backward pass. Every rank has another prompt."""
    world = context.world()
    model = make_model(RECIPES[name], dtype).requires_grad_(True)
    layers = parallelize(model, world, runtime=RuntimeConfig(dispatcher="torch", max_tokens_per_rank=64))
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    count = PROMPTS[context.rank % len(PROMPTS)] + 3
    prompt = torch.randint(3, 60, (1, count), generator=torch.Generator().manual_seed(context.rank))
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits
    logits = whole(prompt, use_cache=False).logits
    for layer in layers:
        layer.close()
    return relative_error(logits.detach(), expected), said(logits.sum().backward)


def by_inductor(context: RankContext) -> list[float]:
    """Errors of a layer between fused operators, for two numbers of tokens: the second is compiled with a symbol."""
    layer = make_layer(context)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(torch.sin(x) * 2)) + 1

    torch._dynamo.reset()
    whole = torch.compile(forward, fullgraph=True)
    errors = []
    for count in (3, 5):
        x = torch.randn(count, layer.config.input_size, generator=torch.Generator().manual_seed(count))
        with inductor.patch({"cpp.vec_isa_ok": True}):  # else it compiles a program for each set of instructions first
            errors.append(relative_error(whole(x), forward(x)))
    layer.close()
    return errors


def unused_output(context: RankContext) -> int:
    """Calls of a layer by compiled code that drops its output: a rank that doesn't need it takes part all the same."""
    layer = make_layer(context)
    x = torch.randn(3, layer.config.input_size)
    before = layer.dispatcher._calls

    def forward(x: torch.Tensor) -> torch.Tensor:
        layer(x)
        return x + 1

    torch._dynamo.reset()
    torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
    calls = layer.dispatcher._calls - before
    layer.close()
    return calls


def like_eager(context: RankContext) -> tuple[bool, bool, str]:
    """Whether a compiled call runs the layer's hooks as often as an eager one, and whether one by `layer.compile()`
    gives the same; what is said to a routing of another kind, which the operator has no room for."""
    layer = make_layer(context)
    layer.register_forward_hook(lambda *call: call[-1] * 2)
    x = torch.randn(3, layer.config.input_size)
    expected = layer(x)
    torch._dynamo.reset()
    whole = torch.compile(lambda x, routing=None: layer(x, routing), backend="aot_eager")
    same = torch.equal(whole(x), expected)
    told = said(lambda: whole(x, (x, x)))
    layer.compile(backend="aot_eager")
    found = same, torch.equal(layer(x), expected), told
    layer.close()
    return found


def refused(context: RankContext) -> str:
    """What compiled code says whose layer is gone."""
    del context
    number = compiled.register(layer := torch.nn.Linear(1, 1))
    del layer
    gc.collect()
    return said(lambda: compiled.moe_layer(torch.zeros(1, 1), number, None, None, None, None, None), RuntimeError)
