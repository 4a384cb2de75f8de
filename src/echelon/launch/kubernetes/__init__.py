"""The Kubernetes launcher (`launcher`): manifests of a job (`manifests`), and its pods as processes (`pods`)."""
