"""Imports Megatron first and the accelerator afterwards, then trains; run under torchrun."""

import runpy

import megatron.core.tensor_parallel
import megatron.core.transformer.moe.token_dispatcher
import megatron.training.training  # noqa: F401

from tests.support.template import TRAIN_GPT

runpy.run_path(TRAIN_GPT, run_name="__main__")
