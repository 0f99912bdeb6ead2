# Makes a cluster on EKS and all that the lessons need in it. `python jobs/clusters/eks/eks.py create CLUSTER` sets
# cluster, region, file and instances (TYPE/ZONE of each node group; the last one trains), says the price, asks, and
# runs this from the repository's root. Once the control plane is there, it can be run again where it broke off.
set -euo pipefail
folder=jobs/clusters/eks

# Never the context that happens to be the current one.
kube() { kubectl --context "$cluster" "$@"; }
apply() { kube apply --server-side --force-conflicts "$@"; }
available() { kube wait --namespace "$1" --for=condition=Available deployment --all --timeout=10m; }

# Are the instances offered in their zone? Zones are called differently in every account.
for each in $instances; do
    offered=$(aws ec2 describe-instance-type-offerings --region "$region" --location-type availability-zone \
        --filters "Name=instance-type,Values=${each%/*}" "Name=location,Values=${each#*/}" \
        --query 'InstanceTypeOfferings[].InstanceType' --output text)
    [ -n "$offered" ] || { echo "${each%/*} is not offered in ${each#*/}; choose another zone in $file" >&2; exit 1; }
done

# Control plane, network and roles: 15 minutes
there=$(aws eks list-clusters --region "$region" --query "clusters[?@=='$cluster']" --output text)
if [ -z "$there" ]; then
    eksctl create cluster -f "$file" --without-nodegroup
else # perhaps broken off in the middle of that: without its network add-on, nodes would cost and never be ready
    aws eks describe-addon --cluster-name "$cluster" --addon-name vpc-cni --region "$region" >/dev/null ||
        { echo "making $cluster was broken off: run delete-all, then create" >&2; exit 1; }
    eksctl utils associate-iam-oidc-provider --cluster "$cluster" --region "$region" --approve
    eksctl create iamserviceaccount -f "$file" --approve
fi

# How kubectl reaches it
aws eks update-kubeconfig --name "$cluster" --region "$region" --alias "$cluster"
kube get namespace default

# Nodes; those that are there already are left as they are
eksctl create nodegroup -f "$file" --install-neuron-plugin=false --install-nvidia-plugin=false

# Volcano, before the operators, which look for its PodGroup when they start
apply -f https://raw.githubusercontent.com/volcano-sh/volcano/v1.15.1/installer/volcano-development.yaml
available volcano-system
apply -f "$folder/queue.yaml"

# TFJob and PyTorchJob; INIT_IMAGE names a copy of the image in your own registry. It is the operator's own, of 3.10: the
# nslookup of later ones ends with 1 if one search domain has no such name, and workers would wait for their master in vain.
init_image=${INIT_IMAGE:-public.ecr.aws/docker/library/alpine:3.10}
kube kustomize "$folder/operators" | sed "s|\${init_image}|$init_image|" | apply -f -
available kubeflow

# MPIJob v2beta1
apply -k "$folder/operators/mpi"
available mpi-operator

# TrainJob
apply -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0'
available kubeflow-system

# Device plugins: nvidia.com/gpu, aws.amazon.com/neuron, and vpc.amazonaws.com/efa in place of eksctl's
if [[ " $instances" == *" "[gp]* ]]; then
    apply -f https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v0.17.1/deployments/static/nvidia-device-plugin.yml
fi
if [[ " $instances" == *" "trn* || " $instances" == *" "inf* ]]; then
    helm upgrade --install neuron oci://public.ecr.aws/neuron/neuron-helm-chart --version 1.9.0 \
        --kube-context "$cluster" --namespace kube-system --set npd.enabled=false --wait
fi
if grep -q 'efaEnabled: true' "$file"; then
    kube delete daemonset aws-efa-k8s-device-plugin-daemonset --namespace kube-system --ignore-not-found
    apply -f "$folder/devices/efa.yaml"
fi

# FSx for Lustre: the driver, how a file system is made, and the claim that makes one: 10 minutes
apply -k 'https://github.com/kubernetes-sigs/aws-fsx-csi-driver/deploy/kubernetes/overlays/stable/?ref=v1.9.0'
kube rollout status --namespace kube-system deployment/fsx-csi-controller --timeout=10m
zone=${instances##*/}
subnet=$(aws ec2 describe-subnets --region "$region" --query 'Subnets[0].SubnetId' --output text --filters \
    "Name=tag:alpha.eksctl.io/cluster-name,Values=$cluster" "Name=availability-zone,Values=$zone" \
    Name=tag:kubernetes.io/role/internal-elb,Values=1)
[ "$subnet" != None ] || { echo "$cluster has no private subnet in $zone" >&2; exit 1; }
security_group=$(aws eks describe-cluster --name "$cluster" --region "$region" \
    --query cluster.resourcesVpcConfig.clusterSecurityGroupId --output text)
sed "s/\${cluster}/$cluster/; s/\${subnet}/$subnet/; s/\${security_group}/$security_group/" \
    "$folder/storage/storage-class.yaml" | apply -f -
apply -f "$folder/storage/claim.yaml"
kube wait --for=jsonpath='{.status.phase}=Bound' pvc/training-data --timeout=30m

# etcd, where torchrun's agents meet
apply -f "$folder/etcd.yaml"
available default
