# Not built anywhere yet (see the support table in README.md).
# NGC's image brings torch, TransformerEngine and Apex; nothing here may install a second torch.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-resilience
COPY . .
RUN pip install --no-cache-dir --no-deps megatron-core==0.19.2 . \
 && pip install --no-cache-dir nvidia-ml-py psutil pyyaml xxhash
WORKDIR /workspace
