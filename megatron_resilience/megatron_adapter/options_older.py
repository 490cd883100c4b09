"""Options that Megatron 0.17 or 0.18 has and 0.19 no longer has, classified like the others. See ``options``."""

from __future__ import annotations

from megatron_resilience.megatron_adapter.options_refused import Refusal, When

NEUTRAL = frozenset(
    {
        "inference_dynamic_batching_cuda_graph_max_tokens",
        "muon_use_nesterov",
        "rl_generation_batch_size",
        "rl_num_parallel_generation_batches",
        "rl_num_parallel_generations",
        "rl_parallel_generation_tasks",
        "tiktoken_special_tokens",
        "tokenizer_hf_include_special_tokens",
        "tokenizer_hf_use_fast",
        "tokenizer_metadata",
        "tokenizer_special_tokens",
    }
)
"""Tokenizers, and what acts only together with an option that is refused (RL's, Muon's, inference's)."""

REFUSED = {
    "cuda_graph_scope": Refusal(
        "--cuda-graph-scope",
        When(lambda value, args: bool(value), ["attn"]),
        "a CUDA graph keeps communicators and addresses that a recovery replaces",
        "leave it out",
    ),
    "scatter_gather_tensors_in_pipeline": Refusal(
        "--no-scatter-gather-tensors-in-pipeline",
        When(lambda value, args: value is False, False),
        "nobody has shown that the pipeline's other way of sending survives a recovery",
        "leave it out",
    ),
    "use_legacy_models": Refusal(
        "--use-legacy-models",
        When(lambda value, args: bool(value), True),
        "the state of models outside megatron.core is not described",
        "leave it out",
    ),
}
"""By argparse destination."""
