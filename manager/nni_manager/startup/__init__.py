"""The settings of a program of the manager before its work: of Python, of libraries when they are imported, of the process.

Modules here import nothing of the manager but each other. Some must be imported before a library; their docstrings name it.
"""
