# examples/train_gpt.py, writing at the beginning and at the end of every step what the logical state is, whatever the
# layout: for each parameter's master, moments and step, a sum over all elements of a hash of (bits, place in the whole tensor).
# Places come from Megatron's own metadata (sharded_state_dict, the distributed optimizer's maps), not from the
# product's catalogue. SUMS names the folder.

import json
import os
import re
import runpy
from pathlib import Path

import numpy as np
import torch
from megatron.core import mpu
from megatron.training import get_args, training

import megatron_resilience.autoload  # noqa: F401
from megatron_resilience.megatron_adapter.catalogue import _labels_of_modules, logical_names
from megatron_resilience.megatron_adapter.state import masters

FIELDS = ("exp_avg", "exp_avg_sq")
PADDED = ("embedding.word_embeddings.weight", "output")
_held = {}


def labels_of(model):
    """By parameter: its logical name, and the place of each of its elements in the whole tensor, flat."""
    found = {}
    offset = (
        mpu.get_expert_model_parallel_rank()
        * (get_args().num_experts or 0)
        // mpu.get_expert_model_parallel_world_size()
    )
    for chunk in model:
        truth = _labels_of_modules(chunk)
        for name, parameter in logical_names(chunk, offset):
            label = truth[parameter.data_ptr()][0] if parameter.data_ptr() in truth else None
            if label is None:  # the tied output layer, which the checkpoint leaves to the embedding
                rows, width = parameter.shape
                label = (np.arange(rows)[:, None] + mpu.get_tensor_model_parallel_rank() * rows) * width + np.arange(
                    width
                )
            found[parameter] = (re.sub(r"^output_layer\.weight$", "output", name), np.ascontiguousarray(label).ravel())
    return found


def mixed(bits, places):
    """uint64 sum of a hash of each element with its place."""
    x = bits.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ (places.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    x ^= x >> np.uint64(31)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return int((x ^ (x >> np.uint64(32))).sum(dtype=np.uint64))


def sums(model, optimizer):
    """By name and field."""
    out = {}
    vocabulary = get_args().vocab_size
    labels = labels_of(model)
    tied_copy = (
        {p for p, (name, _) in labels.items() if name == "output"}
        if not get_args().untie_embeddings_and_output_weights
        else set()
    )
    sharded = get_args().use_distributed_optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, master in masters(part):
            if parameter in tied_copy or master.numel() == 0:
                continue
            name, places = labels[parameter]
            if sharded:
                span = part._get_model_param_range_map(parameter)["param"]
                places = places[span.start : span.end]
            elif mpu.get_data_parallel_rank():
                continue
            replicated = not getattr(parameter, "tensor_model_parallel", False)
            expert = not getattr(parameter, "allreduce", True) or ".local_experts." in name
            if replicated and not expert and mpu.get_tensor_model_parallel_rank():
                continue
            state = part.optimizer.state[master]
            # Rows of the vocabulary's padding come and go with TP.
            real = places < vocabulary * parameter.shape[1] if name in PADDED else slice(None)
            for field, tensor in [("master", master), *((f, state[f]) for f in FIELDS if f in state)]:
                bits = np.from_dlpack(tensor.detach().reshape(-1).view(torch.int32)).view(np.uint32)
                out[f"{name}/{field}"] = (out.get(f"{name}/{field}", 0) + mixed(bits[real], places[real])) % 2**64
            if "step" in state:
                out[f"{name}/step"] = float(state["step"])
    return out


def write(moment, generation):
    with (Path(os.environ["SUMS"]) / f"{moment}{generation}.{get_args().rank}.{os.getpid()}.json").open("w") as file:
        json.dump(sums(*_held["objects"]), file)


def arm():
    step, train = training.train_step, training.train

    def summed(*args, **kwargs):
        write("begin", kwargs["iteration"])
        result = step(*args, **kwargs)
        write("end", kwargs["iteration"] + 1)
        return result

    def held(forward_step, model, optimizer, *rest, **kwargs):
        _held["objects"] = (model, optimizer)
        return train(forward_step, model, optimizer, *rest, **kwargs)

    # Before the product wraps them: what is summed is what its wrapper hands on.
    training.train_step, training.train = summed, held


if __name__ == "__main__":
    arm()
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_gpt.py"), run_name="__main__")
