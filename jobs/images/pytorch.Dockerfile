# PyTorch and BERT's library; SageMaker's drivers come with each job. Build it from the repository's root; build.sh does,
# and stores it in ECR. For processors:
#     docker build -f jobs/images/pytorch.Dockerfile -t workshop-pytorch:cpu .
# and for NVIDIA GPUs (PyTorch's own wheels bring CUDA):
#     docker build -f jobs/images/pytorch.Dockerfile -t workshop-pytorch:gpu --build-arg VARIANT=gpu \
#       --build-arg BASE=ubuntu:24.04 --build-arg EFA_VERSION=1.49.0 .
ARG BASE=debian:12-slim
FROM ${BASE}
ARG VARIANT=cpu
# Where pip finds PyTorch's builds for processors alone; from the default index it brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
COPY jobs/images/requirements.txt jobs/images/requirements-${VARIANT}.txt ./
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv \
    && python3 -m venv /opt/workshop \
    && grep -E '^(numpy|transformers)' requirements.txt > chosen.txt \
    && grep -E '^torch' "requirements-${VARIANT}.txt" >> chosen.txt \
    && /opt/workshop/bin/pip install --no-cache-dir -r chosen.txt \
    && rm -rf /var/lib/apt/lists/*
# For GPUs on several machines: libfabric, and the plugin by which NCCL uses it (aws-ofi-nccl), both of AWS's installer,
# which has the plugin for Ubuntu and Amazon Linux alone. Without them NCCL talks by TCP.
# As in AWS's own images: github.com/aws/deep-learning-containers, scripts/docker/common/install_efa.sh.
ARG EFA_VERSION
# hadolint ignore=DL3003,DL3008
RUN if [ -n "${EFA_VERSION}" ]; then \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates curl \
    && curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_VERSION}.tar.gz" | tar -xz \
    && (cd aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify) \
    && test -f /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so \
    && rm -rf aws-efa-installer /var/lib/apt/lists/*; \
    fi
ENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib
ENV PATH=/opt/workshop/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /opt/ml/code
