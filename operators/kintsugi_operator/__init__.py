"""The Kubernetes operator: `BlendService` and `CorpusPrecompute` become objects of KubeRay and Kubernetes.

Every decision is a pure function of the spec (`api`) and of what the operator observed (`observed`).
`objects` builds manifests. `desired` decides which objects must exist, how one model replaces another, which
shard restarts next and when a job runs. `controller` reads, compares and applies. The operator imports
neither torch nor Ray nor vLLM, and runs in 128 MiB.
"""
