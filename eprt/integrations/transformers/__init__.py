"""transformers models with expert-parallel experts: each rank keeps the attention (data parallel) and its share.

    model = load_without_experts("openai/gpt-oss-120b", dtype=torch.bfloat16)
    layers = parallelize(model, world)             # every rank reads its own experts, in their number format
    world.warmup(*layers)
    tokens = generate(model, prompts)              # any number of prompts on any rank

Importing this package registers `ep_implementation="eprt"` with transformers from 5.23 on. Ranks may run batches of
different size; one without a batch calls `idle_step(model)` for each forward of the others, which `generate` and
`lockstep` do by themselves.
"""

from eprt.integrations.transformers.agreement import expert_layers, idle_step, lockstep
from eprt.integrations.transformers.expert_parallel import register_expert_parallel
from eprt.integrations.transformers.generate import generate
from eprt.integrations.transformers.load import load_without_experts
from eprt.integrations.transformers.parallelize import MoEBlock, parallelize

__all__ = [
    "MoEBlock",
    "expert_layers",
    "generate",
    "idle_step",
    "load_without_experts",
    "lockstep",
    "parallelize",
    "register_expert_parallel",
]

register_expert_parallel()
