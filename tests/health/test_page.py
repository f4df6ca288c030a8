"""The page on loopback: who is answered, with what, that it renews and pauses itself, and that it ends."""

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_air.health import page as page_module
from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.page import PageServer
from lightning_air.health.scene import Scene
from tests.health.report_decoding import decode_report
from tests.health.test_reporter import a_scene, add_poll, wait_until
from tests.kit.chromium import Page, chromium, chromium_missing

needs_browser = pytest.mark.skipif(chromium_missing() is not None, reason=str(chromium_missing()))


@contextmanager
def served(scene: Scene) -> Iterator[PageServer]:
    server = PageServer(scene)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ask(server: PageServer, path: str | None = None, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    address, _, own_path = str(server.url).removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", f"/{own_path}" if path is None else path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_it_shows_what_the_report_shows_and_nobody_keeps_it() -> None:
    with served(a_scene()) as server:
        status, headers, text = ask(server)
        assert status == 200
        assert decode_report(text).head["columns"] == 3
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers


def test_each_has_an_address_of_its_own_that_cannot_be_guessed() -> None:
    with served(a_scene(1)) as one, served(a_scene(1)) as other:
        tokens = [str(server.url).rsplit("/", 2)[1] for server in (one, other)]
        assert len(set(tokens)) == 2
        assert all(len(token) >= 32 for token in tokens)
        assert all(str(server.url).startswith("http://127.0.0.1:") for server in (one, other))


@pytest.mark.parametrize("path", ["/", "/x/", "", "/../", "/%00", "//"])
def test_without_the_token_there_is_nothing(path: str) -> None:
    with served(a_scene()) as server:
        status, _, text = ask(server, path or "*")
        assert (status, "GPU" in text) == (404, False)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),  # a name of theirs that leads to 127.0.0.1
        ({"Host": "evil.example:127"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),  # a link
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 200),
        ({"Host": "localhost:8080"}, 200),  # a forwarded port
        ({"Host": "localhost"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:9090"}, 403),
    ],
    ids=range(15),
)
def test_only_this_machine_and_this_page_are_answered(headers: dict[str, str], status: int) -> None:
    with served(a_scene()) as server:
        found, _, text = ask(server, **headers)
        assert found == status
        assert ("GPU health" in text) == (status == 200)


def test_it_listens_on_loopback_only() -> None:
    with served(a_scene()) as server:
        port = int(str(server.url).split(":")[2].split("/")[0])
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = {line.split()[1] for line in lines if line.split()[3] == "0A"}
        assert {each for each in listening if each.endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}


def test_other_methods_are_refused() -> None:
    with served(a_scene()) as server:
        address, _, path = str(server.url).removeprefix("http://").partition("/")
        for method in ("POST", "PUT", "OPTIONS", "DELETE"):
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(method, f"/{path}")
            assert connection.getresponse().status == 501
            connection.close()


def test_many_who_ask_at_once_are_shown_one_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, drawn = a_scene(), []
    render = Scene.render

    def counted(self: Scene, *, is_live: bool = False) -> str:
        drawn.append(1)
        return render(self, is_live=is_live)

    monkeypatch.setattr(Scene, "render", counted)
    monkeypatch.setattr(page_module, "_FRESH_SECONDS", 3_600)
    with served(scene) as server:
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(ask(server)[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 8
    assert len(drawn) == 1


def test_it_ends_soon_whoever_holds_a_connection_and_then_answers_nobody() -> None:
    server = PageServer(a_scene())
    server.start()
    host, port = str(server.url).removeprefix("http://").split("/")[0].split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\n")  # and no more
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 10  # it would be for ever
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    server.close()


def test_its_address_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), served(a_scene()) as server:
        ask(server)
        ask(server, "/wrong/")
    assert [str(server.url) in record.getMessage() for record in caplog.records] == [True]


def test_where_nothing_can_listen_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Address family not supported")

    monkeypatch.setattr(page_module._Server, "server_bind", refuse)
    server = PageServer(a_scene())
    server.start()
    server.close()
    assert "There is no page of the GPUs: 127.0.0.1 cannot be listened on" in caplog.text
    assert server.url is None


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as opened:
        opened.look(1280, 800)
        yield opened


def open_page(page: Page, server: PageServer) -> None:
    page.open(str(server.url))
    page.wait_for("document.documentElement.dataset.state")
    assert page.evaluate("document.documentElement.dataset.state") == "drawn"


def state(page: Page) -> str:
    return page.evaluate("document.getElementById('state').textContent")


def columns(page: Page) -> int:
    return page.evaluate("report.data.columns")


@needs_browser
def test_the_button_brings_what_is_new_and_keeps_the_chosen_time(page: Page) -> None:
    scene = a_scene(20)
    with served(scene) as server:
        open_page(page, server)
        assert columns(page) == 20
        assert state(page) == "Updates every 10 s"
        page.evaluate("report.view.zoom(0.5)")
        chosen = page.evaluate("[report.view.from, report.view.to]")
        add_poll(scene, 20)
        scene.events.add("hang", "Rank 3 is stuck <b>in a collective</b>.")
        time.sleep(page_module._FRESH_SECONDS)
        page.evaluate("document.getElementById('refresh').click()")
        page.wait_for("report.data.columns === 21")
        page.wait_for("document.getElementById('state').textContent.startsWith('Updated ')")
        assert page.evaluate("[report.view.from, report.view.to]") == chosen
        assert page.evaluate("document.querySelector('h1').textContent").startswith("The GPUs were well, but")
        assert "<b>in a collective</b>" in page.evaluate("document.getElementById('events').textContent")
        assert {request.partition("?")[0] for request in page.requests} == {server.url}
        assert page.complaints == []


@needs_browser
def test_it_renews_itself_pauses_without_a_visitor_and_goes_on_with_one(page: Page) -> None:
    scene = a_scene(2)
    with served(scene) as server:
        open_page(page, server)
        assert page.evaluate("[live.everySeconds, live.idleSeconds]") == [10, 300]
        page.evaluate("clearInterval(live.timer); live.timer = setInterval(tick, 100)")
        add_poll(scene, 2)
        page.wait_for("report.data.columns === 3")

        page.evaluate("live.seen = Date.now() - 301000")
        page.wait_for("document.getElementById('state').textContent.startsWith('Paused')")
        page.wait_for("!live.isAsking")
        asked = len(page.requests)
        add_poll(scene, 3)  # the GPUs are still read
        time.sleep(page_module._FRESH_SECONDS + 0.5)
        assert len(page.requests) == asked
        assert columns(page) == 3

        page.hover(300, 300)
        page.wait_for("report.data.columns === 4")
        assert page.complaints == []


@needs_browser
def test_after_the_run_it_says_that_there_is_no_answer_and_keeps_what_it_shows(page: Page) -> None:
    with served(a_scene(5)) as server:
        open_page(page, server)
    page.evaluate("document.getElementById('refresh').click()")
    page.wait_for("document.getElementById('state').textContent.startsWith('No answer: the run has ended')")
    assert columns(page) == 5


@needs_browser
def test_another_site_cannot_read_it_nor_frame_it(page: Page, tmp_path: Path) -> None:
    with served(a_scene(5)) as server:
        other = tmp_path / "other.html"
        other.write_text(f"<iframe id=f src='{server.url}'></iframe>")
        page.open(other.as_uri())
        got = page.evaluate(f"fetch('{server.url}').then(answer => answer.text(), () => 'refused')")
        assert got == "refused"
        seen = page.evaluate(
            "(() => { try { return !!f.contentDocument.getElementById('data') } catch { return false } })()"
        )
        assert seen is False


@needs_browser
def test_a_page_without_gpus_fills_when_they_are_read(page: Page) -> None:
    scene = Scene(History(720, 10), EventLog())
    with served(scene) as server:
        open_page(page, server)
        assert page.evaluate("document.querySelector('h1').textContent") == "No GPU was read."
        add_poll(scene, 0)
        add_poll(scene, 1)
        time.sleep(page_module._FRESH_SECONDS)
        page.evaluate("document.getElementById('refresh').click()")
        page.wait_for("document.querySelector('h1').textContent.startsWith('Nothing was wrong: 1 GPU')")
        page.wait_for("report.plots.length >= 8")
        assert page.complaints == []


def test_the_page_ends_with_what_waits_for_it(tmp_path: Path) -> None:
    with served(a_scene()) as server:
        wait_until(lambda: any(thread.name == "air-gpu-page" for thread in threading.enumerate()))
        assert server.url is not None
    wait_until(lambda: not any(thread.name.startswith("air-gpu-page") for thread in threading.enumerate()))
