"""Import this before anything that imports gRPC: its core then writes no line to stderr for each stranger that connects.

The core reads its setting once, while it is imported. Trials of this machine inherit the environment as it was. Who wants to
hear gRPC's own errors sets GRPC_VERBOSITY.
"""

import os

_SETTING = "GRPC_VERBOSITY"

if _SETTING not in os.environ:
    os.environ[_SETTING] = "NONE"
    try:
        import grpc.aio  # noqa: F401
    finally:
        del os.environ[_SETTING]
