# BERT's job for machines with Trainium: AWS's image with the Neuron SDK, and what the script needs beside it. Build it
# from the repository's root; build.sh does, and stores it in ECR:
#     docker build --platform linux/amd64 -f jobs/images/neuron.Dockerfile -t workshop-neuron:trn1 .
# The image below is for Trainium 1, whose last SDKs with training are older than today's; for Trainium 2 and 3, name
# AWS's image with TorchNeuron as BASE (see jobs/bert_pretraining/README.md).
ARG BASE=public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workshop/job
COPY jobs/images/requirements-neuron.txt ./
RUN pip install --no-cache-dir -r requirements-neuron.txt
COPY jobs/bert_pretraining/train.py ./
COPY workshop_utils/idx.py workshop_utils/place.py ./workshop_utils/
COPY workshop_utils/training/checkpoints.py ./workshop_utils/training/
ENV PYTHONPATH=/workshop/job \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1
