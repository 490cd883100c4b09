"""Benchmarks with goals: ``python -m megatron_resilience.bench NAME [...]``, one module per name."""
