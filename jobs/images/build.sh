#!/bin/bash
# Builds an image and stores it in ECR, where SageMaker and EKS find it:
#     jobs/images/build.sh --dry-run horovod cpu us-east-1 123456789012
# With --dry-run it prints what it would run, and runs nothing.
set -eu

usage() {
    echo "usage: $0 [--dry-run] horovod|pytorch cpu|gpu REGION ACCOUNT" >&2
    echo "       $0 [--dry-run] neuron trn1|trn2 REGION ACCOUNT" >&2
    exit 2
}

run=
if [ "${1:-}" = --dry-run ]; then
    run=echo
    shift
fi
[ $# -eq 4 ] || usage
name=$1 variant=$2 region=$3 account=$4
case $name-$variant in
horovod-cpu | horovod-gpu | pytorch-cpu | pytorch-gpu | neuron-trn1 | neuron-trn2) ;;
*) usage ;;
esac
[[ $region =~ ^[a-z]{2}(-[a-z]+)+-[0-9]$ ]] || usage
[[ $account =~ ^[0-9]{12}$ ]] || usage

registry=$account.dkr.ecr.$region.amazonaws.com
image=$registry/workshop-$name:$variant
arguments=()
if [ "$name" != neuron ]; then
    arguments+=(--build-arg "VARIANT=$variant")
fi
if [ "$name-$variant" = neuron-trn2 ]; then
    if [ -z "${BASE:-}" ]; then
        echo "BASE is not set; for trn2 it must name AWS's image with TorchNeuron" >&2
        exit 2
    fi
    arguments+=(--build-arg "BASE=$BASE")
fi
if [ "$name-$variant" = pytorch-gpu ]; then # with EFA's libraries, which there are for Ubuntu
    arguments+=(--build-arg BASE=ubuntu:24.04 --build-arg EFA_VERSION=1.49.0)
fi
if [ "$name-$variant" = horovod-gpu ]; then
    arguments+=(--build-arg BASE=nvidia/cuda:12.9.1-cudnn-devel-ubuntu24.04)
fi
if [ "$variant" = cpu ] && [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then
    arguments+=(--build-arg "PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL")
fi

cd "$(dirname "$0")/../.."

# A repository for it, tagged so that the clean-up finds it; images are scanned as they come.
if [ -n "$run" ] || ! aws ecr describe-repositories --region "$region" --repository-names "workshop-$name" >/dev/null 2>&1; then
    $run aws ecr create-repository --region "$region" --repository-name "workshop-$name" \
        --image-scanning-configuration scanOnPush=true \
        --tags Key=made-by,Value=distributed-training-workshop
fi

# A password for twelve hours.
if [ -n "$run" ]; then
    echo "aws ecr get-login-password --region $region | docker login --username AWS --password-stdin $registry"
else
    aws ecr get-login-password --region "$region" | docker login --username AWS --password-stdin "$registry"
fi

$run docker build --platform linux/amd64 -f "jobs/images/$name.Dockerfile" ${arguments[@]+"${arguments[@]}"} -t "$image" .
$run docker push "$image"

# What was pushed, by its content: a tag may be moved, and a node that has an image of that name does not pull it again.
# The Kubernetes launcher names an image by the digest that stands here.
if [ -z "$run" ]; then
    pushed=jobs/images/pushed.yaml
    # One for each registry that the image was pushed to.
    digest=$(docker inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image" |
        grep -m 1 "^$registry/workshop-$name@") || { echo "docker does not say what was pushed" >&2; exit 1; }
    { grep -v "^\"$image\"" "$pushed" 2>/dev/null || true; } >"$pushed.new"
    echo "\"$image\": \"${digest#*@}\"" >>"$pushed.new"
    mv "$pushed.new" "$pushed"
fi
echo "image: $image" # for the field of that name in a job.yaml
