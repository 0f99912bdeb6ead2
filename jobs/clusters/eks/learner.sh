#!/bin/bash
# Gives a learner a namespace with a quota and the rights to run jobs there, or takes it away with all that is in it. The
# cluster's administrator runs it from the repository's root, with AWS_REGION set to the cluster's:
#     bash jobs/clusters/eks/learner.sh add workshop-cpu ada arn:aws:iam::123456789012:user/ada
#     bash jobs/clusters/eks/learner.sh remove workshop-cpu ada arn:aws:iam::123456789012:user/ada
# The learner then runs `aws eks update-kubeconfig --region REGION --name workshop-cpu --alias workshop-cpu`, for which their
# policy in IAM must allow eks:DescribeCluster, and has `namespace: ada` in a place.yaml.
set -euo pipefail

usage() {
    echo "usage: $0 add|remove CLUSTER LEARNER ARN (LEARNER: small letters, digits and '-')" >&2
    exit 2
}
[ $# -eq 4 ] || usage
action=$1 cluster=$2 learner=$3 arn=$4
[[ $learner =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ && $learner != default && $learner != kube-* ]] || usage
region=${AWS_REGION:?must be the region of the cluster}
kube() { kubectl --context "$cluster" "$@"; }
eks() { aws eks "$@" --cluster-name "$cluster" --principal-arn "$arn" --region "$region"; }
fail() { echo "$*" >&2; exit 1; }

# Is there a namespace of this name, or an access entry for this ARN, that was not made here? Both stay as they are.
if entry=$(eks describe-access-entry --query accessEntry.kubernetesGroups --output text 2>&1); then
    [ "$entry" = "workshop:$learner" ] || fail "$arn has an access entry already, for the groups: $entry"
elif [[ $entry == *ResourceNotFoundException* ]]; then
    entry=""
else # such as a login that has expired
    fail "$entry"
fi
part_of='{.metadata.name}/{.metadata.labels.app\.kubernetes\.io/part-of}'
namespace=$(kube get namespace "$learner" --ignore-not-found --output jsonpath="$part_of")
[[ -z $namespace || $namespace == "$learner/distributed-training-workshop" ]] ||
    fail "the namespace $learner was not made here; take another name"

case $action in
add)
    volume=$(kube get pvc training-data --namespace default --output jsonpath='{.spec.volumeName}')
    [ -n "$volume" ] || fail "the claim training-data has no volume yet"
    of_volume() { kube get pv "$volume" --output jsonpath="{.spec.csi.$1}"; }
    file_system=$(of_volume volumeHandle)
    dnsname=$(of_volume volumeAttributes.dnsname)
    mountname=$(of_volume volumeAttributes.mountname)
    sed "s/\${learner}/$learner/g; s/\${file_system}/$file_system/; s/\${dnsname}/$dnsname/; s/\${mountname}/$mountname/" \
        jobs/clusters/eks/learner.yaml | kube apply --server-side --force-conflicts -f -
    [ -n "$entry" ] || eks create-access-entry --kubernetes-groups "workshop:$learner"
    ;;
remove)
    [ -z "$entry" ] || eks delete-access-entry
    kube delete namespace --selector "app.kubernetes.io/part-of=distributed-training-workshop,kubernetes.io/metadata.name=$learner"
    kube delete pv "training-data-$learner" --ignore-not-found
    ;;
*) usage ;;
esac
