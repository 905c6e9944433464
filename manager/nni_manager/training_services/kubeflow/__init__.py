"""Kubeflow and its alternatives: jobs are TFJobs, PyTorchJobs, TrainJobs, or plain Kubernetes Jobs."""
