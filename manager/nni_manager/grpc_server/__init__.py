"""The gRPC side of the manager: decode, one call, encode."""
