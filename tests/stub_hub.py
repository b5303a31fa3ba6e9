"""As much of the Hugging Face hub as `datasets` needs to find and fetch one data set.

The paths and headers are those of the hub's own API; the files are a folder on this disk.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

REPOSITORY = "owner/chats"
COMMIT = "a" * 40


def handler(root: Path, asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """Serves `root` as the repository, and notes what was asked for."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(f"{self.command} {path}")
            if path.startswith(f"/api/datasets/{REPOSITORY}"):
                tree = re.search(r"/tree/\w+/?(.*)", path)
                self.answer(*json_of(listing(root / tree[1]) if tree else repository()))
            elif path.startswith(f"/datasets/{REPOSITORY}/resolve/"):
                self.send_file(root / path.split("/", 6)[6])
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def send_file(self, file: Path) -> None:
            if not file.is_file():
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content, code = file.read_bytes(), 200
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(file)}"'}
            if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                content, code = content[start : end + 1], 206
            self.answer(code, content, headers)

        def answer(self, code: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    def listing(folder: Path) -> list[dict[str, object]]:
        return [
            {
                "type": "directory" if entry.is_dir() else "file",
                "path": entry.relative_to(root).as_posix(),
                "oid": oid(entry),
                "size": 0 if entry.is_dir() else entry.stat().st_size,
            }
            for entry in sorted(folder.iterdir())
        ]

    return Hub


def json_of(value: object) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def repository() -> dict[str, object]:
    return {"id": REPOSITORY, "sha": COMMIT, "private": False, "gated": False, "disabled": False}


def oid(entry: Path) -> str:
    return hashlib.sha1(str(entry).encode()).hexdigest()


@contextmanager
def hub_of(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, what was asked for) of a hub whose only repository is `root`."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(root, asked))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
