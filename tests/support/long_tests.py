"""Which tests are long, which files are begun first, and which share a worker."""

from __future__ import annotations

# Files with tests of many seconds: begun first, none of them is what everybody waits for in the end.
SLOW = (
    "test_kernels_interpreted",
    "test_launch",
    "test_faults",
    "test_fault_trials",
    "test_cli",
    "test_ranks",
    "test_world",
    "test_cutedsl_compile",
)

# The tests marked `long`, which scripts/test_long.sh runs: FILE::TEST[PARAMETERS] begins with one of these. Parameters
# whose values say more than their names are marked in their files.
LONG = (
    # Kernels compiled to machine code: they change with their libraries, or with a few files of ours.
    r"test_triton_registers::",
    r"test_few_registers::",
    r"test_pdl::",
    r"test_compile_ahead::test_(a_warm_up|a_kernel_that|what_is_forked|workers.*\[one)",
    r"test_cutedsl_compile::",
    r"test_kernels_interpreted::.*\[(?!placement|push)",
    r"test_compile::",  # importing torch.compile takes longer than what it compiles here
    r"test_generation::test_a_compiled_model",
    r"test_gpu_layers_on_gloo::test_humming_on_stand_ins",
    # Every family's numbers are those of one process by another test; here the way into transformers differs.
    r"test_families::test_(greedy|tokens|the_command)",
    r"test_generation::test_greedy_tokens_are_those_of_one_process\[(?!gpt_oss|qwen3_moe|deepseek_v3\])",
    r"test_generation::test_the_registered_implementation_gives_the_same_tokens\[(?!gpt_oss|qwen3_moe|deepseek_v3)",
    r"test_integration::test_logits_are_those_of_the_saved_checkpoint\[(?!gpt_oss|qwen3_moe|deepseek_v3)",
    r"test_integration::test_a_published.*(float_channel|gptq)",  # files differ; every shard of them is another test's
    # A rank that replays beside one that doesn't, in steps and out of them: each once; a model's graphs, on one model.
    r"test_step_graphs_on_gloo::test_layers_with_graphs_of_their_own.*\[(-1-True|1-False)",
    r"test_generation::test_decode_steps_from_graphs.*\[(qwen3_moe|deepseek_v3)\]",
    # Launchers that start interpreters, and a third signal that ends them as the second does.
    r"test_fault_trials::test_a_signal",
    r"test_cli::test_a_signal_ends_all_ranks_and_leaves_no_folder\[(1|2)\]",
    r"test_cli::test_run_joins_torchrun",
    r"test_cli::test_a_broken_rank_ends_the_run.*\[19",  # a stopped rank is waited for; a killed one isn't
    r"test_launch::test_(a_node|two_nodes|slurm|its_command)",
    r"test_placement::test_a_loop_of_200",  # experts that move in fewer steps are beside it
    # Hosts and a Slurm of namespaces: scripts/test_hosts.sh.
    r"test_hosts::",
    r"test_slurm::",
    r"test_cli_generate::test_a_signal",
    r"test_generate_fuzz::",
    r"test_hostile_dialects::test_broken_files_cost_little",
    r"test_generate_kills::",
    r"test_generation_starts::",
    r"test_pages::test_commands_in_blocks_run\[bench",
    r"test_page_code::test_fragments\[README",
    r"test_plugins::test_a_strangers",
    # Every check comes before a pair of backends does anything: one pair shows what it says.
    r"test_bad_input::test_.*(none-flat|expert_major)",
    # Four ranks meet what one and two do; a world cut in all three ways, what one cut in one of them does.
    r"test_matrix::test_transport\[.*-[12]-",
    r"test_matrix::test_layer\[[12]-",
    r"test_matrix::test_layer_under_tensor_parallelism\[2-",
    r"test_matrix::test_layer_cuts_what_is_over_its_capacity\[1-",
    r"test_transformers::test_layer_equals_transformers_block\[(?!ep1-moetp1-attntp1|ep4-moetp2-attntp2)",
    # The executor that runs shows the way there and back; the one that is its witness has tests of its own.
    r"test_matrix::test_layer(_under_tensor_parallelism)?\[.*-reference-",
    # Emulated libraries carry each format, for GPUs that nothing has run on; a plan's pair alone shows what each does.
    r"test_sm100_pairs::test_layer_(behind|under)",
)

# Files whose ranks run transformers' models: imported once, not in each rank.
TRANSFORMERS = (
    "test_families",
    "test_integration",
    "test_generation",
    "test_step_graphs_on_gloo",
    "test_compile",
    "test_page_code",
    "test_generation_options",
    "test_packed_dialects",
    "test_cli_generate",
)

# A long file whose tests all read what one job of ranks found: one worker has them. Of other long files each test goes
# to whichever worker is free, else one would have all models long after the others have ended.
ONE_JOB = ("test_families",)

# Files whose short tests take from each other what a process makes or imports once: one worker has all of a group. So
# do long ones of the cases: ranks keep a case's inputs, layers and right outputs.
GROUPS = {
    "models": (*TRANSFORMERS, "test_transformers", "test_models", "test_model_dialects"),
    "cases": ("test_matrix", "test_bad_input", "test_payload_scale", "test_mutations", "test_sm100_pairs"),
    "libraries": (
        *("test_flashinfer_sm90", "test_flashinfer_sm100", "test_flashinfer_a2a", "test_humming"),
        "test_packed_checkpoints",
    ),
    "dispatchers": ("test_gpu_jobs_on_gloo", "test_gpu_layers_on_gloo"),
    "layers": (
        *("test_layer", "test_batch_invariant", "test_placement", "test_load_experts", "test_balance", "test_step"),
        "test_shared_exchange",
    ),
}
