"""The trial keeper: the first process of a task, which runs trials and replicates their output to the manager."""

# The single source of the version: pyproject.toml reads it from here. (importlib.metadata costs 40 ms at each keeper's start.)
__version__ = "0.7.0"
