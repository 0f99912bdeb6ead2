"""A cluster on EKS for the jobs of the lessons: what it costs, made step by step, and taken away again.

    python -m workshop_utils.eks price trainium
    python -m workshop_utils.eks create trainium --dry-run       # prints every command, sends nothing
    python -m workshop_utils.eks create trainium                 # says the price, asks, and goes through the steps
    python -m workshop_utils.eks delete-all trainium             # the same backwards

What runs are eksctl, kubectl, helm and aws, which must be installed. Both ways can be run again where they broke off.

| module | concept |
| --- | --- |
| `cluster` | a cluster, and its ClusterConfig in jobs/clusters/eks/clusters/ |
| `prices` | what it costs an hour |
| `steps` | the commands that make it, in order, and those that take it away |
"""
