"""The user's name comes from the workspace, and its absence from anywhere is no error."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lightning_air.tracking.workspace_user import ask_workspace_user


class Workspace(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path.endswith("/scim/v2/Me") and self.headers["Authorization"] == "Bearer token"
        body = json.dumps({"userName": "me@x.example"} if found else {"error_code": "NOT_FOUND"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / ".databrickscfg"))
    with HTTPServer(("127.0.0.1", 0), Workspace) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_user_of_the_environments_credentials(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", workspace)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    assert ask_workspace_user("databricks") == "me@x.example"
    monkeypatch.setenv("DATABRICKS_TOKEN", "another")
    assert ask_workspace_user("databricks", timeout_seconds=2) is None


def test_user_of_a_profile(workspace: str, tmp_path: Path) -> None:
    (tmp_path / ".databrickscfg").write_text(f"[lab]\nhost = {workspace}\ntoken = token\n")
    assert ask_workspace_user("databricks://lab") == "me@x.example"
    assert ask_workspace_user("databricks://none") is None
