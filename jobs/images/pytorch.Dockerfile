# PyTorch, BERT's library, and the toolkit by which SageMaker starts scripts; torchrun needs nothing else. Build it from the
# repository's root; build.sh does, and stores it in ECR. For processors:
#     docker build -f jobs/images/pytorch.Dockerfile -t workshop-pytorch:cpu .
# and for NVIDIA GPUs (PyTorch's own wheels bring CUDA):
#     docker build -f jobs/images/pytorch.Dockerfile -t workshop-pytorch:gpu --build-arg VARIANT=gpu .
ARG BASE=debian:12-slim
FROM ${BASE}
ARG VARIANT=cpu
# Where pip finds PyTorch's builds for processors alone; from the default index it brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
COPY jobs/images/requirements.txt jobs/images/requirements-${VARIANT}.txt ./
# The compiler is for the toolkit's one C file, and leaves in the same layer.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && python3 -m venv /opt/workshop \
    && grep -E '^(numpy|transformers|sagemaker-training)' requirements.txt > chosen.txt \
    && grep -E '^torch' "requirements-${VARIANT}.txt" >> chosen.txt \
    && /opt/workshop/bin/pip install --no-cache-dir -r chosen.txt \
    && apt-get purge -y --auto-remove gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/workshop/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /opt/ml/code
CMD ["train"]
