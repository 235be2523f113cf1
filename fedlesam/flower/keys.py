"""Certificates for TLS, and the key pairs of SuperNodes.

An authority (ca.crt, ca.key), the SuperLink's certificate (server.crt, server.key) for the given names and addresses,
and a key pair for every SuperNode (node0, node0.pub, ...). Private files are readable by their owner only. ca.key
signs new certificates: keep it off the machines.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, SERVER = "fedlesam authority", "fedlesam SuperLink"
LOCAL = ("127.0.0.1", "localhost")
UNUSED = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


def make_keys(out: Path, hosts: Sequence[str], nodes: int, days: int = 365) -> None:
    """Make all certificates and keys of a deployment. A file that exists is never replaced.

    Args:
        out: the folder; only its owner may enter it.
        hosts: names and addresses of the SuperLink, in addition to those of this machine.
        nodes: the number of SuperNodes.
        days: how long the certificates are valid.
    """
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    certificates = {
        "ca": (authority, _certificate(AUTHORITY, authority, authority, days, [])),
        "server": (server, _certificate(SERVER, server, authority, days, [*dict.fromkeys([*LOCAL, *hosts])])),
    }
    for name, (key, made) in certificates.items():
        _write(out / f"{name}.key", _private_bytes(key, pem.PrivateFormat.PKCS8), private=True)
        _write(out / f"{name}.crt", made.public_bytes(pem.Encoding.PEM), private=False)
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        _write(out / f"node{node}", _private_bytes(key, pem.PrivateFormat.OpenSSH), private=True)
        public = key.public_key().public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH)
        _write(out / f"node{node}.pub", public + b"\n", private=False)


def _write(path: Path, content: bytes, private: bool) -> None:
    """Private from the first byte on."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(path, flags, 0o600 if private else 0o644), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise ValueError(f"{path} exists already: choose another folder with --out, or delete it first") from None


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: pem.PrivateFormat) -> bytes:
    return key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, days: int, hosts: list[str]
) -> x509.Certificate:
    """Of the authority if there are no hosts, else of a server of these names."""
    now = datetime.datetime.now(datetime.UTC)
    authority = not hosts
    unused = dict.fromkeys(UNUSED, False)
    usage = x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **unused)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False).add_extension(server, critical=False)
    return builder.sign(signer, hashes.SHA256())
