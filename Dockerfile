# No image has been built from this yet (see the support table in README.md); its install steps are run by tests/test_dockerfile.py.
# NGC's image brings torch, TransformerEngine, Apex and NumPy; nothing here may install a second torch.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-resilience
COPY . .
RUN pip install --no-cache-dir --no-deps megatron-core==0.19.2 . \
 && pip install --no-cache-dir nvidia-ml-py==13.615.71 psutil==7.2.2 pyyaml==6.0.4 xxhash==4.1.0
WORKDIR /workspace
