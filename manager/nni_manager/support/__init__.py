"""General-purpose code that knows nothing of experiments: time, tasks, text, HTTP on this machine, processes left behind.

Every layer may import it. Of the manager, modules here import only `nni_manager.errors` and each other.
"""
