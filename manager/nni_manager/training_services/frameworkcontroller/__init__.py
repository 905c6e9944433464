"""FrameworkController: a job is a Framework, each of its tasks a pod."""
