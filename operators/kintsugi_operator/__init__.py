"""The Kubernetes operator: `BlendService` and `CorpusPrecompute` become objects of KubeRay and Kubernetes.

Everything that decides is a pure function of what the user asked for (`api`) and what the operator saw
(`observed`). `objects` builds manifests. `desired` decides which ones there have to be, how one model
replaces another, which shard restarts next and when a job runs. `controller` reads, compares and applies.
The operator imports neither torch, Ray nor vLLM: it runs in 128 MiB.
"""
