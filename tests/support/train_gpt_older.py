import megatron_resilience.autoload  # noqa: F401, I001

# examples/train_gpt.py on Megatron 0.17 and 0.18, which lack functions of 0.19 that it calls: they are put in their places here,
# made of what those releases have.

import inspect
import runpy
from pathlib import Path

import megatron.core.utils
import megatron.training
import megatron.training.utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import argument_utils, arguments, get_args
from megatron.training.arguments import core_transformer_config_from_args

_pretrain = megatron.training.pretrain
_providers = []


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """The model that 0.19 builds from its GPTModelConfig."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def parse(extra_args_provider):
    """0.17 has one function that parses and starts: it parses again in pretrain()."""
    _providers.append(extra_args_provider)
    return arguments.parse_args(extra_args_provider)


def pretrain(config, datasets, model_type, forward_step):
    """0.19's order of arguments."""
    if "cfg_container" in inspect.signature(_pretrain).parameters:
        return _pretrain(config, datasets, model_provider, model_type, forward_step)
    return _pretrain(datasets, model_provider, model_type, forward_step, extra_args_provider=_providers[-1])


def install():
    """Fills in what is missing."""
    megatron.training.pretrain = pretrain
    argument_utils.gpt_config_from_args = lambda args: None
    if hasattr(megatron.core.utils, "get_batch_on_this_tp_rank"):
        of_core = megatron.core.utils.get_batch_on_this_tp_rank

        def get_batch(batch, has_cu_seqlens, **rest):
            return of_core(batch, is_sft=has_cu_seqlens, **rest)
    else:
        of_training = megatron.training.utils.get_batch_on_this_tp_rank

        def get_batch(batch, **rest):
            return of_training(iter([batch]) if batch else None)

    megatron.core.utils.get_batch_on_this_tp_rank = get_batch
    if not hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args = parse
        argument_utils.pretrain_cfg_container_from_args = lambda args, config: None


# Once in a process, however often ranks that are forked from it run this script.
if not hasattr(argument_utils, "gpt_config_from_args"):
    install()

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_gpt.py"), run_name="__main__")
