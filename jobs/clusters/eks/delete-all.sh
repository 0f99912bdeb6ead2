# Takes a cluster on EKS away, with the jobs and the data in it. `python jobs/clusters/eks/eks.py delete-all CLUSTER` sets
# cluster, region and file, asks, and runs this from the repository's root. It can be run again where it broke off.
set -euo pipefail

kube() { kubectl --context "$cluster" "$@"; }

there=$(aws eks list-clusters --region "$region" --query "clusters[?@=='$cluster']" --output text)
if [ -n "$there" ]; then
    # How kubectl reaches it
    aws eks update-kubeconfig --name "$cluster" --region "$region" --alias "$cluster"
    kube get namespace default

    # Jobs of all kinds, and their pods, which hold the claim
    kube delete --ignore-not-found customresourcedefinition tfjobs.kubeflow.org pytorchjobs.kubeflow.org \
        mpijobs.kubeflow.org trainjobs.trainer.kubeflow.org jobs.batch.volcano.sh
    kube delete jobs,deployments,pods --all --namespace default
    # Learners' namespaces, and their volumes, which would stay
    kube delete namespaces,persistentvolumes --selector app.kubernetes.io/part-of=distributed-training-workshop

    # The file system: it goes with its claim, and all that is on it
    kube delete -f jobs/clusters/eks/storage/claim.yaml --ignore-not-found
    kube wait --for=delete persistentvolumes --all --timeout=30m || true # there may be none; what is left is found below
fi

# File systems that a claim has left behind: they cost, and the network cannot go before them
for _ in $(seq 90); do
    ours="Tags[?Key=='made-by'&&Value=='distributed-training-workshop']&&Tags[?Key=='cluster'&&Value=='$cluster']"
    left=$(aws fsx describe-file-systems --region "$region" --output text \
        --query "FileSystems[?$ours].[FileSystemId,Lifecycle]")
    [ -n "$left" ] || break
    while read -r id state; do
        # Nor can one be deleted while it is being made.
        [[ $state == DELETING || $state == CREATING ]] ||
            aws fsx delete-file-system --region "$region" --file-system-id "$id"
    done <<<"$left"
    sleep 20
done
[ -z "$left" ] || { echo "not gone after half an hour: $left" >&2; exit 1; }

# Nodes, control plane, network and roles, or what was left of them
stacks=$(aws cloudformation describe-stacks --region "$region" --output text \
    --query "Stacks[?Tags[?Key=='alpha.eksctl.io/cluster-name'&&Value=='$cluster']].StackName")
if [ -n "$there$stacks" ]; then
    eksctl delete cluster --name "$cluster" --region "$region" --wait --disable-nodegroup-eviction
fi
kubectl config delete-context "$cluster" || true # it may never have been there
echo "nothing of $cluster is left"
