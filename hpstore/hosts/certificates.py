"""Certificates of hosts and of those who call them, made by an authority of one's own.

DIRECTORY/authority/   ca.pem, key.pem: keep it off the hosts; it can make any certificate
DIRECTORY/hosts/b/     ca.pem, certificate.pem, key.pem of the service on host b
DIRECTORY/callers/x/   the same of a process, with a role
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError
from hpstore.hosts.caller_roles import CallerRole
from hpstore.runtime.mutual_tls import AUTHORITY, CERTIFICATE, KEY, ROLE_URI
from hpstore.runtime.text_files import write_atomically

AUTHORITY_FOLDER, HOSTS_FOLDER, CALLERS_FOLDER = "authority", "hosts", "callers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_AUTHORITY_DAYS = 3650
_AHEAD = datetime.timedelta(hours=1)  # clocks of hosts differ


def make_host(directory: Path, name: str, addresses: Sequence[str], days: int) -> Path:
    """A new certificate of a host's service, for its name and addresses; the folder to copy there.

    Raises ConfigError.
    """
    names = [_general_name(text) for text in dict.fromkeys((name, *addresses))]
    return _make(directory, HOSTS_FOLDER, name, names, days, server=True)


def make_caller(directory: Path, name: str, role: CallerRole, days: int) -> Path:
    """A new certificate of a process that calls hosts. Raises ConfigError."""
    from cryptography import x509

    names = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role.name.lower()}")]
    return _make(directory, CALLERS_FOLDER, name, names, days, server=False)


def _general_name(text: str) -> Any:  # Any: cryptography is not installed everywhere
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} cannot be the name of a host in a certificate: such names are ASCII. "
            'Nothing was made; give its IDNA form ("xn--..."), or its address'
        ) from error


def _make(
    directory: Path, folder: str, name: str, names: Sequence[Any], days: int, *, server: bool
) -> Path:
    """Any: of cryptography."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} names no host and no caller: letters, digits, '.', '-', '_'")
    if not 0 < days <= _AUTHORITY_DAYS:
        raise ConfigError(f"a certificate is for 1 to {_AUTHORITY_DAYS} days, not {days}")
    authority, its_key = _authority(directory / AUTHORITY_FOLDER)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    made = (
        _builder(name, key.public_key(), authority.subject, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(its_key.public_key()),
            critical=False,
        )
        .sign(its_key, hashes.SHA256())
    )
    place = directory / folder / name
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(place / AUTHORITY, _pem(authority), 0o644)
    _write(place / KEY, _key_pem(key), 0o600)
    _write(place / CERTIFICATE, _pem(made), 0o644)
    return place


def _authority(place: Path) -> tuple[Any, Any]:
    """The one that is there, or a new one. Any: of cryptography."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if (place / KEY).exists():
        try:
            found = x509.load_pem_x509_certificate((place / AUTHORITY).read_bytes())
            return found, serialization.load_pem_private_key((place / KEY).read_bytes(), None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the authority in {place} cannot be used: {error}") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"hpstore hosts {os.urandom(4).hex()}"
    subject = _subject(name)
    made = (
        _builder(name, key.public_key(), subject, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(place / AUTHORITY, _pem(made), 0o644)
    _write(place / KEY, _key_pem(key), 0o600)
    return made, key


def _subject(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(name: str, public_key: Any, issuer: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _AHEAD)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    return str(certificate.public_bytes(serialization.Encoding.PEM).decode("ascii"))


def _key_pem(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return str(data.decode("ascii"))


def _write(path: Path, text: str, mode: int) -> None:
    try:
        write_atomically(path, text, mode=mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
