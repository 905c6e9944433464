"""Verifies that the server at an address is the manager: it has the certificate that manager.json names."""

import ssl

from trial_keeper.wire.listener_uid import connect
from trial_keeper.wire.metadata import MANAGER_NAME

# The certificate has this name instead of the address, which may change. Source: grpc_types.h.
TLS_OPTIONS = [("grpc.ssl_target_name_override", MANAGER_NAME)]


def verify_certificate(address: str, certificate: str, timeout_s: float) -> str | None:
    """Verify the server at HOST:PORT, or at a Unix socket. Returns the problem as text; None if it owns the certificate.

    Raises:
        OSError: no server responds.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=certificate)
        context.set_alpn_protocols(["h2"])
    except (ssl.SSLError, ValueError) as error:
        return f"cannot read the certificate in manager.json: {error}"
    with connect(address, timeout_s) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=MANAGER_NAME):
                return None
        except ssl.SSLCertVerificationError as error:
            return f"cannot trust {address}: it lacks the certificate that manager.json names ({error.verify_message})"
        except ssl.SSLError:
            return f"cannot trust {address}: it does not use TLS, although manager.json names a certificate"
