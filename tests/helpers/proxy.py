"""The nginx of examples/flower-cifar/nginx.conf, on loopback."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from machines import APP, free_port, wait

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@contextlib.contextmanager
def proxy(folder: Path, keys: Path, superlink: int) -> Iterator[tuple[int, Path]]:
    """The port of a running proxy, and its log of requests. Only places are replaced in the configuration."""
    assert NGINX is not None
    folder.mkdir()
    port = free_port()
    text = (APP / "nginx.conf").read_text(encoding="utf-8")
    for old, new in {
        "listen 8443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{superlink};",
        "allow 192.0.2.0/24;": "allow 127.0.0.1;",
        "/etc/fedlesam/": f"{keys}/",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "site.conf").write_text(text, encoding="utf-8")
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    log = folder / "access.log"
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log {log};\n{paths}include {folder}/site.conf;\n}}\n",
        encoding="utf-8",
    )
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=errors
        )
    try:
        wait("nginx", lambda: (folder / "pid").exists() or process.poll() is not None, 30)
        assert process.poll() is None, (folder / "stderr").read_text()
        yield port, log
    finally:
        process.terminate()
        process.wait(15)
