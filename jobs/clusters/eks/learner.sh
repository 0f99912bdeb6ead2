#!/bin/bash
# Gives a learner a namespace with a quota and the rights to run jobs there, or takes it away with all that is in it. The
# cluster's administrator runs it from the repository's root, in the AWS region of the cluster:
#     bash jobs/clusters/eks/learner.sh add workshop-cpu ada arn:aws:iam::123456789012:user/ada
#     bash jobs/clusters/eks/learner.sh remove workshop-cpu ada arn:aws:iam::123456789012:user/ada
# The learner then runs `aws eks update-kubeconfig --name workshop-cpu --alias workshop-cpu`, for which their policy in IAM
# must allow eks:DescribeCluster, and has `namespace: ada` in a place.yaml.
set -euo pipefail

usage() {
    echo "usage: $0 add|remove CLUSTER LEARNER ARN (LEARNER: small letters, digits and '-')" >&2
    exit 2
}
[ $# -eq 4 ] || usage
action=$1 cluster=$2 learner=$3 arn=$4
[[ $learner =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ && $learner != default && $learner != kube-* ]] || usage
kube() { kubectl --context "$cluster" "$@"; }

case $action in
add)
    volume=$(kube get pvc training-data --namespace default --output jsonpath='{.spec.volumeName}')
    of_volume() { kube get pv "$volume" --output jsonpath="{.spec.csi.$1}"; }
    sed "s/\${learner}/$learner/g; s/\${file_system}/$(of_volume volumeHandle)/
        s/\${dnsname}/$(of_volume volumeAttributes.dnsname)/; s/\${mountname}/$(of_volume volumeAttributes.mountname)/" \
        jobs/clusters/eks/learner.yaml | kube apply --server-side --force-conflicts -f -
    aws eks create-access-entry --cluster-name "$cluster" --principal-arn "$arn" --kubernetes-groups "workshop:$learner"
    ;;
remove)
    aws eks delete-access-entry --cluster-name "$cluster" --principal-arn "$arn" || true # it may be gone already
    # Only a namespace that was made here: not kube-system, nor somebody's own.
    kube delete namespace --selector "app.kubernetes.io/part-of=distributed-training-workshop,kubernetes.io/metadata.name=$learner"
    kube delete pv "training-data-$learner" --ignore-not-found
    ;;
*) usage ;;
esac
