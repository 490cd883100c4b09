# Two images; none has been built from this yet (see the support table in README.md). Their install steps are run by
# tests/test_dockerfile.py.
#
#   docker build .                      for GPUs, on NVIDIA's image
#   docker build --target laptop .      CPU only; `docker run IMAGE` shows the quickstart
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3

FROM python:3.12-slim AS laptop
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The torch of PyPI would do as well, but brings CUDA's libraries, ten times the size.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.14.1
WORKDIR /opt/megatron-resilience
COPY . .
RUN pip install --no-cache-dir megatron-core==0.19.2 matplotlib==3.11.2 sentencepiece==0.2.3 \
        nvidia-ml-py==13.615.71 psutil==7.2.2 pyyaml==6.0.4 xxhash==4.1.0 \
 && pip install --no-cache-dir --no-deps .
ENV MEGATRON_RESILIENCE_ACCELERATOR=cpu
WORKDIR /workspace
CMD ["python", "/opt/megatron-resilience/examples/quickstart.py"]

# NGC's image brings torch, TransformerEngine, Apex and NumPy; nothing here may install a second torch.
FROM ${BASE} AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-resilience
COPY . .
RUN pip install --no-cache-dir --no-deps megatron-core==0.19.2 . \
 && pip install --no-cache-dir nvidia-ml-py==13.615.71 psutil==7.2.2 pyyaml==6.0.4 xxhash==4.1.0
WORKDIR /workspace
