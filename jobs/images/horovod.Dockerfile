# TensorFlow, PyTorch and Horovod, with the toolkit by which SageMaker starts scripts. Build it from the repository's
# root; build.sh does, and stores it in ECR. For processors:
#     docker build -f jobs/images/horovod.Dockerfile -t workshop-horovod:cpu .
# and for NVIDIA GPUs:
#     docker build -f jobs/images/horovod.Dockerfile -t workshop-horovod:gpu \
#       --build-arg BASE=nvidia/cuda:12.9.1-cudnn-devel-ubuntu24.04 --build-arg VARIANT=gpu .
ARG BASE=debian:12-slim

# Compilers, and Horovod built by the same script as on a learner's machine.
FROM ${BASE} AS build
ARG VARIANT=cpu
# Where pip finds PyTorch's builds for processors alone; from the default index it brings gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ libopenmpi-dev make openmpi-bin patch python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/workshop
ENV PATH=/opt/workshop/bin:$PATH
WORKDIR /build
COPY jobs/images/requirements.txt jobs/images/requirements-${VARIANT}.txt ./
# BERT's library is in pytorch.Dockerfile's image.
RUN grep -v '^transformers' requirements.txt > chosen.txt \
    && pip install --no-cache-dir -r chosen.txt -r requirements-${VARIANT}.txt
COPY workshop_utils/__init__.py workshop_utils/cache.py workshop_utils/
COPY workshop_utils/setup/horovod_build.py workshop_utils/setup/logged_command.py workshop_utils/setup/machine.py \
    workshop_utils/setup/
COPY workshop_utils/setup/horovod_build.sh workshop_utils/setup/horovod-0.28.1.patch workshop_utils/setup/
# For GPUs, Horovod's operations go through NCCL, which the local set-up has no use for.
RUN if [ "${VARIANT}" = gpu ]; then export HOROVOD_GPU_OPERATIONS=NCCL; fi; \
    python -m workshop_utils.setup.horovod_build

# What runs: no compilers.
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/workshop /opt/workshop
# mpirun starts its ranks on the other hosts through ssh. All hosts of a job run this image, so they share its key; it
# opens nothing but containers of this image, inside the job's security group. As sagemaker-training's mpi.py says, PAM
# must not insist on a login's id, which a container may not set; and sshd ends at once without keys of the host.
RUN mkdir -p /run/sshd /root/.ssh \
    && ssh-keygen -A \
    && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519 \
    && cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys \
    && printf 'Host *\n  StrictHostKeyChecking no\n' > /root/.ssh/config \
    && sed -i 's@session\s*required\s*pam_loginuid.so@session optional pam_loginuid.so@g' /etc/pam.d/sshd
ENV PATH=/opt/workshop/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
WORKDIR /opt/ml/code
# SageMaker runs `train`, which the toolkit has put on the path; a script comes with each job, not with the image.
CMD ["train"]
