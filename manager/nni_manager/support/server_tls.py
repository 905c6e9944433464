"""The certificate of a web server, from a user's files. They may be replaced while the server runs, as ACME clients do.

The certificate decides which hosts browsers accept. `nnictl` and the page of all experiments compare its fingerprint with that
which the server has published, so they connect by any address.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nni_manager")


class TlsFilesUnusable(UserError):
    """cannot use the files of --tls-certificate and --tls-key; see the message"""


@dataclass(frozen=True, slots=True)
class TlsCertificate:
    """A certificate with its key, as a server presents it."""

    context: ssl.SSLContext = field(repr=False)
    sha256: str
    """The fingerprint, as browsers show it: hexadecimal bytes with colons."""
    hosts: tuple[str, ...]
    """The host names in it, without wildcards."""
    warning: str
    """The reason why browsers refuse it today; empty: none is known."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of a certificate, with its intermediate ones after it, and of its key."""

    certificate: Path
    key: Path

    @classmethod
    def of(
        cls, certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
    ) -> TlsFiles | None:
        """The files of two options; None: neither is given.

        Raises:
            TlsFilesUnusable: one of them is missing.
        """
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            given, missing = (
                ("--tls-key", "--tls-certificate")
                if certificate is None
                else ("--tls-certificate", "--tls-key")
            )
            raise TlsFilesUnusable(f"cannot use {given} without {missing}; name both files")
        # Links stay: ACME clients change where they point to.
        return cls(*(Path(os.path.abspath(os.path.expanduser(each))) for each in (certificate, key)))

    def read(self) -> TlsCertificate:
        """Read and check both files.

        Raises:
            TlsFilesUnusable: a file is unusable, other users may read the key, or the two do not belong together.
        """
        # Imported here: these imports take 80 ms, and few servers have such files.
        import ssl

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        content, _ = _read("--tls-certificate", self.certificate)
        try:
            certificate = x509.load_pem_x509_certificates(content)[0]
            hosts = _hosts_of(certificate)
        except ValueError as error:
            raise TlsFilesUnusable(
                f"cannot use --tls-certificate {self.certificate}: it is no certificate in PEM format; "
                "convert it with `openssl x509 -inform der -in FILE -out NEW`"
            ) from error
        _check_key(self.key, certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise TlsFilesUnusable(
                f"cannot use --tls-certificate {self.certificate} with --tls-key {self.key}: {error}; request a new certificate"
            ) from error
        digest = certificate.fingerprint(hashes.SHA256()).hex(":").upper()
        return TlsCertificate(context, digest, hosts, self._warning_of(certificate))

    def _warning_of(self, certificate: Any) -> str:
        now, path = datetime.now(timezone.utc), self.certificate
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > end:
            return f"the certificate {path} expired on {end:%Y-%m-%d}, and browsers refuse it; renew it"
        if now < start:
            return (
                f"the certificate {path} is not valid before {start:%Y-%m-%d %H:%M} UTC, and browsers refuse it; "
                "check the clock of this machine"
            )
        return ""

    def version(self) -> tuple[Any, ...] | None:
        """A value that changes when one of the files is replaced; None: one is missing, which an ACME client may be replacing."""
        try:
            found = [os.stat(path) for path in (self.certificate, self.key)]
        except OSError:
            return None
        return tuple((each.st_dev, each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


class RenewableCertificate:
    """The certificate that a server presents, read again when its files change. `call_when_renewed` gets each later one."""

    def __init__(self, files: TlsFiles, call_when_renewed: Callable[[TlsCertificate], None]) -> None:
        """Raises `TlsFilesUnusable`."""
        self._files, self._call_when_renewed = files, call_when_renewed
        self._version, self._problem = files.version(), ""
        self.current = files.read()

    async def refresh(self) -> None:
        """Read the files if they have changed. If they are unusable, the former certificate stays, and the log has the reason."""
        # Imported here: every nnictl imports this module, and asyncio costs 50 ms.
        import asyncio

        version = await asyncio.to_thread(self._files.version)
        if version in (None, self._version):
            return
        try:
            renewed = await asyncio.to_thread(self._files.read)
            if renewed.sha256 != self.current.sha256:
                self._call_when_renewed(renewed)
        except (TlsFilesUnusable, OSError) as error:
            # The second of the two files may still be written, or a disk be full: the next call tries again.
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("the former certificate is still used: %s", error)
            return
        self._version, self.current, self._problem = version, renewed, ""
        log.info("the certificate was renewed, its fingerprint is %s", renewed.sha256)
        if renewed.warning:
            log.warning("%s", renewed.warning)


def _read(option: str, path: Path) -> tuple[bytes, os.stat_result]:
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno())
    except OSError as error:
        raise TlsFilesUnusable(
            f"cannot use {option} {path}: {error.strerror}; name a file that this user can read"
        ) from error


def _check_key(path: Path, certificate: Any) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    content, found = _read("--tls-key", path)
    # As in ssh, for a key of this user. One of root may have a group: Debian's /etc/ssl/private and mounted secrets do so.
    is_own, mode = found.st_uid == os.geteuid(), found.st_mode
    if mode & (stat.S_IRWXO | (stat.S_IRWXG if is_own else stat.S_IWGRP)):
        raise TlsFilesUnusable(
            f"cannot use --tls-key {path}: its mode {stat.S_IMODE(mode):04o} lets other users read or change it; "
            f"run `chmod 600 {path}`, or mount it with mode 0400"
        )
    try:
        key = load_pem_private_key(content, None)
    except TypeError as error:
        raise TlsFilesUnusable(
            f"cannot use --tls-key {path}: it has a passphrase, which nobody could enter; "
            f"write it without one with `openssl pkey -in {path} -out NEW`"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsFilesUnusable(
            f"cannot use --tls-key {path}: it is no private key in PEM format; name the key of the certificate"
        ) from error
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise TlsFilesUnusable(
            f"cannot use --tls-key {path}: it is not the key of the first certificate in --tls-certificate; "
            "name the two files that were issued together"
        )


def _hosts_of(certificate: Any) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(name.lower() for name in names.get_values_for_type(x509.DNSName) if not name.startswith("*"))
