"""The Kubernetes operator: `BlendService` and `CorpusPrecompute` become objects of KubeRay and Kubernetes.

Everything that decides is a pure function of what was asked (`api`) and what was seen (`observed`): `desired`
says which objects there have to be, `rollout` how a model replaces another, `shards` which shard restarts
next, `corpus` when a job runs. The shell around it (`operator`, `reconcile`, `cluster`, `election`) reads,
compares and applies. Neither torch, ray nor vLLM is imported: it runs in 128 MiB.
"""
