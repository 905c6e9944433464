"""Silences gRPC's core. Import this module before anything that imports gRPC.

Otherwise the core writes a line to stderr for each unknown client. The core reads its setting once, when it is imported.
Trials on this machine inherit the original environment. Set GRPC_VERBOSITY to see gRPC's own errors.
"""

import os

_SETTING = "GRPC_VERBOSITY"

if _SETTING not in os.environ:
    os.environ[_SETTING] = "NONE"
    try:
        import grpc.aio  # noqa: F401
    finally:
        del os.environ[_SETTING]
