"""`fedlesam deploy check`: what is insecure or missing in a Flower app, its connection and its SuperLink."""

import datetime
import ipaddress
import os
import socket
import ssl
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedlesam.core.names import unknown
from fedlesam.flower.app import App, read_app

PRIVATE = b"PRIVATE KEY-----"
SOON = datetime.timedelta(days=30)
PATIENCE = 5.0
GUIDE = "https://github.com/fedlesam/fedlesam/blob/main/docs/deploy.md"
LOCAL = ":local:"
"""The address of the SuperLink that flwr itself starts, for its simulation."""


@dataclass(frozen=True)
class Finding:
    """One result of the check."""

    level: Literal["ok", "note", "missing", "insecure"]
    """`missing` and `insecure` need something to be done."""
    text: str
    """What was found, and the remedy."""


ok, note, missing, insecure = (partial(Finding, level) for level in ("ok", "note", "missing", "insecure"))


@dataclass(frozen=True)
class Connection:
    """The connection of `flwr run`, from Flower's configuration file."""

    name: str
    """Of its section in the file."""
    host: str
    """Of the SuperLink."""
    port: int
    """Of the SuperLink's Control API."""
    insecure: bool
    """Whether it goes without TLS."""
    root_certificates: Path | None
    """The file by which the SuperLink is known; None where Flower's configuration names none."""

    @property
    def local(self) -> bool:
        """Whether the SuperLink is on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def address(self) -> str:
        """host:port"""
        return f"{self.host}:{self.port}"

    def exposed(self, text: str) -> Finding:
        """What is insecure, unless the SuperLink is on this machine.

        Args:
            text: the finding.
        """
        return Finding("note" if self.local else "insecure", text)


def check(app: Path, superlink: str | None = None) -> Iterator[Finding]:
    """Check an app, this machine's environment, the connection and the SuperLink.

    Args:
        app: the folder of the Flower app.
        superlink: a name of Flower's configuration file; None takes its default.
    """
    read = read_app(app)
    yield from check_app(read)
    yield from check_environment(os.environ)
    for found in read_connection(superlink):
        if isinstance(found, Connection):
            yield from check_connection(found)
            yield from check_superlink(found, read)
        else:
            yield found


def check_app(app: App) -> Iterator[Finding]:
    """Check an app's parts and settings, and that no private key is in its folder.

    Args:
        app: the app.
    """
    for name in ("serverapp", "clientapp"):
        module = app.components.get(name)
        if app.file_of(name) is None:
            yield missing(f"{app.pyproject}: {name} is {module!r}, and there is no such file in {app.folder}")
        else:
            yield ok(f"{name}: {module}")
    yield from _check_config(app.config, app.pyproject)
    for file in (path for path in sorted(app.folder.rglob("*")) if path.is_file() and _holds_private_key(path)):
        yield insecure(f"{file}: a private key in the app's folder; keep keys outside of what `flwr run` packs")
        if file.stat().st_mode & 0o077:
            yield insecure(f"{file}: others can read this private key; chmod 600 {file}")


def _check_config(config: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    from fedlesam.algorithms import CATALOGUE

    name = config.get("algorithm")
    if isinstance(name, str) and name not in CATALOGUE:
        yield missing(f"{path}: {unknown('algorithm', name, CATALOGUE)}")
    if "folder" in config and not config["folder"]:
        yield note("folder is empty: a server that stops cannot resume; set it to a full path on the server")
    elif config.get("folder") and not Path(str(config["folder"])).is_absolute():
        yield missing(f"folder {config['folder']!r} must be a full path: Flower starts the app anywhere")
    clients, minimum = config.get("clients"), config.get("minimum")
    if isinstance(clients, int) and isinstance(minimum, int) and minimum > clients:
        yield missing(f"minimum is {minimum} of {clients} clients: no round can end")


def _holds_private_key(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return PRIVATE in content.read(200)
    except OSError:
        return False


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the environment variables of this machine; the SuperLink and the SuperNodes have their own.

    Args:
        environment: the variables.
    """
    if environment.get("FLWR_TELEMETRY_ENABLED", "1") == "1":
        yield note("Flower's telemetry is on; export FLWR_TELEMETRY_ENABLED=0 on every machine to turn it off")
    if environment.get("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION") != "1":
        yield note(
            "a SuperLink started here would install what an app asks for when it runs; start it with "
            "--disable-runtime-dependency-installation"
        )


def read_connection(name: str | None) -> Iterator[Finding | Connection]:
    """The connection that `flwr run` would use, or findings that explain why there is none.

    Args:
        name: in Flower's configuration file; None takes its default.
    """
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        yield missing(f"{path}: not there, so flwr knows no SuperLink; write [superlink.NAME] into it")
        return
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    known = [key for key, value in table.items() if isinstance(value, dict)]
    name = name or table.get("default")
    if name not in known:
        raise ValueError(f"{path}: {unknown('SuperLink', str(name), known)}")
    settings = table[name]
    if "options" in settings or settings.get("address") == LOCAL:
        yield note(f"{name} is Flower's simulation on this machine: there is no network to check")
        return
    host, _, port = str(settings.get("address", "")).rpartition(":")
    if not host or not port.isdecimal():
        yield missing(f"{path}: the address of {name} must be host:port, got {settings.get('address')!r}")
        return
    roots = settings.get("root-certificates")
    certificates = (path.parent / Path(str(roots)).expanduser()) if roots else None
    yield Connection(str(name), host.strip("[]"), int(port), bool(settings.get("insecure", False)), certificates)


def check_connection(connection: Connection) -> Iterator[Finding]:
    """Check the settings of a connection.

    Args:
        connection: of `flwr run`.
    """
    if connection.insecure:
        where = "fine on one machine only" if connection.local else "models and code travel in the clear"
        text = f"{connection.name}: insecure = true, no TLS: {where}; certificates: {GUIDE}"
        yield connection.exposed(text)
    elif connection.root_certificates is None:
        yield note(f"{connection.name}: no root-certificates; the SuperLink's must be signed by a public one")
    elif not connection.root_certificates.exists():
        yield missing(f"{connection.root_certificates}: the root certificate is not there")


def check_superlink(connection: Connection, app: App) -> Iterator[Finding]:
    """Check the certificate of a SuperLink, what it permits without an account, and who is connected.

    Args:
        connection: of `flwr run`.
        app: the app, which has a number of clients.
    """
    address = connection.address
    if connection.root_certificates is not None and not connection.root_certificates.exists():
        return
    try:
        yield from _check_tls(connection)
    except ssl.SSLCertVerificationError as error:
        yield insecure(f"{address}: its certificate is not accepted: {error.verify_message}")
    except ssl.SSLError as error:
        yield insecure(f"{address}: does not speak TLS ({error.reason}); start it with --ssl-certfile")
    except OSError as error:
        yield missing(f"{address}: cannot be reached: {error}; is the SuperLink up, and the port open?")
    else:
        yield from _check_access(connection, app)


def check_nodes(online: int, app: App) -> Finding:
    """Compare the connected SuperNodes with the app's clients.

    Args:
        online: how many are connected.
        app: the app.
    """
    are, clients = f"{online} SuperNode{' is' if online == 1 else 's are'} connected", app.clients
    if clients is None:
        return (ok if online else missing)(are)
    if online < clients:
        return missing(
            f"{are}, the app has {clients} clients: start the others, each with its own partition-id, or give the run "
            "the number that there is (--run-config clients=N)"
        )
    if online > clients:
        return note(f"{are}, the app has {clients} clients: only those with partition-id 0 to {clients - 1} are used")
    return ok(f"{are}, one for each of {clients} clients")


def _check_tls(connection: Connection) -> Iterator[Finding]:
    with socket.create_connection((connection.host, connection.port), PATIENCE) as plain:
        if connection.insecure:
            return
        context = ssl.create_default_context(cafile=connection.root_certificates)
        with context.wrap_socket(plain, server_hostname=connection.host) as secure:
            shown: Any = secure.getpeercert() or {}
            version = secure.version()
    ends = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), datetime.UTC)
    left = ends - datetime.datetime.now(datetime.UTC)
    text = f"{connection.address}: {version}, certificate good until {ends:%Y-%m-%d}"
    yield missing(f"{text}; renew it") if left < SOON else ok(text)


def _check_access(connection: Connection, app: App) -> Iterator[Finding]:
    """Try to register a SuperNode, which is removed again at once, and to list nodes, without an account."""
    import httpx
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    roots = connection.root_certificates.read_bytes() if connection.root_certificates else None
    where = (connection.address, connection.insecure, roots)
    private, public = generate_key_pairs()
    try:
        with FleetHttpClient.from_server_address(*where, [NodeAuthHttpInterceptor(private, public)]) as fleet:
            made = fleet.RegisterNode(RegisterNodeFleetRequest(public_key=public_key_to_bytes(public)))
            fleet.UnregisterNode(UnregisterNodeFleetRequest(node_id=made.node_id))
        yield connection.exposed("any SuperNode is accepted; start the SuperLink with --enable-supernode-auth")
    except httpx.HTTPError as error:
        code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if code != httpx.codes.PRECONDITION_FAILED:
            yield missing(
                f"this is not a SuperLink of Flower 1.41 or newer: {error if code is None else f'HTTP {code}'}"
            )
            return
        yield ok("a SuperNode with an unknown key is refused")
    try:
        with ControlHttpClient.from_server_address(*where, []) as control:
            nodes = control.ListNodes(ListNodesRequest()).nodes_info
    except httpx.HTTPStatusError as error:
        yield ok(f"starting runs needs an account (HTTP {error.response.status_code})")
        return
    yield check_nodes(sum(node.status == "online" for node in nodes), app)
    yield connection.exposed(
        "whoever reaches this port can start runs and register SuperNodes: Flower asks for no account; let only "
        f"your own machine reach /v1/control (firewall or proxy: {GUIDE})"
    )
