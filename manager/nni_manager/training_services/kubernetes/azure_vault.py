"""Reads the key of an Azure storage account from its owner's vault.

The login is that of this process: the AZURE_* variables of a service principal, a workload's or a machine's managed
identity, or the user of the Azure CLI. No message, log or repr contains the key.

Source: azure-identity, DefaultAzureCredential; Key Vault REST API, Get Secret.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
from http import HTTPStatus

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from azure.identity import DefaultAzureCredential
from azure.keyvault.secrets import SecretClient

from nni_manager.errors import UserError
from nni_manager.training_services.kubernetes.section import AzureStorage
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.share import StorageUnavailable

_MAX_CHARS = 300
# These libraries log all headers of every call, and their error logs add nothing to our errors.
for _name in ("azure", "msal"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def read_key(storage: AzureStorage, retry_policy: ClientRetryPolicy) -> str:
    """Returns the account's current key.

    Raises:
        UserError: no login may read the key, or it does not exist.
        StorageUnavailable: the vault is unreachable.
    """
    what = f"cannot read the key of storage account {storage.account}"
    where = f"secret {storage.secret} of the vault {storage.vault}"
    limits = {
        "retry_total": retry_policy.tries - 1,
        "retry_backoff_factor": retry_policy.first_s,
        "retry_backoff_max": retry_policy.longest_s,
        "connection_timeout": retry_policy.connect_within_s,
        "read_timeout": retry_policy.answer_within_s,
    }
    address = f"https://{storage.vault}.vault.azure.net"
    try:
        with (
            contextlib.closing(DefaultAzureCredential(**limits)) as login,
            contextlib.closing(SecretClient(address, login, **limits)) as vault,
        ):
            key = vault.get_secret(storage.secret).value or ""
    except ResourceNotFoundError as error:
        raise UserError(
            f"{what}: {where} does not exist; correct keyVault, or store the key in that secret"
        ) from error
    except ClientAuthenticationError as error:
        raise UserError(
            f"{what}: Azure rejects this process's login ({error_text(error)}); log in with `az login`, set AZURE_TENANT_ID, "
            "AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or give this machine a managed identity"
        ) from error
    except HttpResponseError as error:
        if error.status_code != HTTPStatus.FORBIDDEN:
            raise StorageUnavailable(
                f"{what}: {where} is not available ({error_text(error)}); try again later"
            ) from error
        raise UserError(
            f"{what}: this login may not read {where} ({error_text(error)}); ask the vault's owner for the role Key Vault "
            "Secrets User, and allow this machine in the vault's firewall"
        ) from error
    except AzureError as error:
        raise StorageUnavailable(
            f"{what}: the vault at {address} does not answer ({error_text(error)}); check the network and "
            "keyVault.vaultName"
        ) from error
    try:
        base64.b64decode(key, validate=True)
    except binascii.Error:
        key = ""
    if not key:
        raise UserError(
            f"{what}: {where} is not the key of a storage account; store one of the account's two keys there"
        )
    return key


def error_text(error: AzureError) -> str:
    """Returns Azure's error message, on one line."""
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        # An error code of the file service is an enum member; the vault's is in its message.
        code = getattr(error, "error_code", None) or (error.error and error.error.code)
        return f"it answers {error.status_code} {getattr(code, 'value', code) or error.reason}"
    lines = str(error.message).strip().splitlines() or [type(error).__name__]
    # A failed credential chain reports its own failure first; Azure's own answer contains an AADSTS code.
    return next((line for line in lines if "AADSTS" in line), lines[0]).strip()[:_MAX_CHARS]
