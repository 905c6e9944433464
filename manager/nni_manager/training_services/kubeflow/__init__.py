"""Kubeflow and what clusters run in its place: jobs are TFJobs, PyTorchJobs, TrainJobs, or plain Jobs of Kubernetes."""
