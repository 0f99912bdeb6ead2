"""The kinds for which no client has a table, as strict models: MPIJob v2beta1, Volcano's Job and Queue, ClusterConfig.

| module | concept |
| --- | --- |
| `strict` | a model that refuses what a strict API server would, in sentences; the parts that core kinds share |
| `mpijob` | MPIJob of the MPI operator |
| `volcano` | Job and Queue of Volcano |
| `cluster_config`, `node_groups` | eksctl's ClusterConfig, and the nodes in it |
"""
