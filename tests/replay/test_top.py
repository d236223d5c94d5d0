"""`pagepool top`: views of dumps and of metrics, as text, live, and as a page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("prometheus_client")
import prometheus_client
from command_line import Page, invoke, refuse
from sources import run_python

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
)
from pagepool.dump import read_dump
from pagepool.errors import ArgumentError
from pagepool.replay.top.metrics import read_views
from pagepool.replay.top.page import make_page
from pagepool.replay.top.view import View, list_lines, view_dump
from pagepool.stats.prometheus import CacheCollector

SPEC = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
SCRIPT = "<script>document.title='pwned'</script>"
IMAGE = '<img src=x onerror="document.title=1">'


def make_manager(**options: Any) -> CacheManager:
    manager = CacheManager(100, [CacheGroupSpec(SPEC)], 64, **options)
    for i, name in enumerate((SCRIPT, IMAGE, "chat-7", "a\x1b[31mb\n" + "x" * 300)):
        request = EngineRequest(name, [*range(8), *[i] * (4 * i + 1)])
        hits, num = manager.get_computed_pages(request)
        assert manager.allocate_slots(request, request.num_tokens - num, num, hits) is not None
    manager.page_pool.get_new_pages(3)
    return manager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(make_manager(host_tier=HostTier(200)).dump()))
    return path


def expose(*managers: CacheManager, queue: str = "") -> str:
    """Return the metrics of managers as a server would."""
    registry, collector = prometheus_client.CollectorRegistry(), CacheCollector(managers[0], {"engine": "0"})
    for i, manager in enumerate(managers[1:], 1):
        collector.add(manager, {"engine": f"{i}"})
    registry.register(collector)
    return str(prometheus_client.generate_latest(registry).decode()) + queue


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Return a function that serves contents, one after another and the last one again, and returns the address."""
    servers: list[HTTPServer] = []

    def start(*contents: bytes, status: int = 200) -> str:
        rest = [*contents]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(rest.pop(0) if len(rest) > 1 else rest[0])

            def log_message(self, *_: Any) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# --- views ----------------------------------------------------------------------------------------------------------


def test_a_dump_and_the_metrics_show_the_same() -> None:
    manager = make_manager(host_tier=HostTier(200))
    of_dump = view_dump(read_dump(json.dumps(manager.dump()).encode()), "x")
    [of_metrics] = read_views(expose(manager), 1.0)
    lines = [(line.section, line.label, line.value) for line in list_lines(of_dump)]
    assert [(line.section, line.label, line.value) for line in list_lines(of_metrics)] == lines
    [ours], [theirs] = of_dump.pools, of_metrics.pools
    assert ours[:5] == theirs[:5] == ("kv", 99, 84, 15, theirs.num_cached_pages)
    assert ours.list_kinds() == theirs.list_kinds() == [("request", 12), ("caller", 3)]
    assert (of_metrics.title, of_metrics.holders) == ("engine 0", None)
    assert {line.section for line in list_lines(of_dump)} == {"look-ups", "pages", "host tier"}


def test_managers_by_labels_and_a_queue() -> None:
    queue = 'pagepool_waiting_requests{engine="1"} 5\npagepool_waiting_requests{engine="0"} 4\npagepool_waiting_tokens 7\n'
    first, second = read_views(expose(make_manager(), CacheManager(9, [CacheGroupSpec(SPEC)], 64), queue=queue), 1.0)
    assert [first.pools[0].num_pages, second.pools[0].num_pages] == [99, 8]
    for view, num in ((first, 4), (second, 5)):
        waiting = [(line.label, line.value) for line in list_lines(view) if line.section == "waiting queue"]
        assert waiting == [("requests", num), ("tokens", 7)]


def test_changes_in_a_second() -> None:
    def view(seconds: float, num: float) -> View:
        return View("x", seconds, (), {"evicted_pages_total": num, "leased_pages": num}, None)

    def rates(now: View, before: View | None) -> list[float | None]:
        return [line.rate for line in list_lines(now, before)]

    assert rates(view(12, 50), view(10, 40)) == [5, None]
    assert rates(view(12, 5), view(10, 40)) == [None, None]  # it has restarted
    assert rates(view(10, 50), view(10, 40)) == [None, None]
    assert rates(view(10, 50), None) == [None, None]


@pytest.mark.parametrize(
    "text",
    ["", "hello world", "<html>", "pagepool_pages", "pagepool_pages x", "other_metric 1\n", 'pagepool_pages{engine="0} 1\n'],
)
def test_what_is_no_metric(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^metrics: got "):
        read_views(text, 1.0)


def test_damaged_metrics_are_refused_or_read() -> None:
    rng, text = Random(1), expose(make_manager())
    for _ in range(150):
        damaged = [*text]
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(damaged))
            damaged[start : start + rng.choice((0, 1, 200))] = rng.choice(
                ('"', "{", "}", "\n", "-", "9" * 30, "NaN", "\\", "\x00")
            )
        try:
            views = read_views("".join(damaged), 1.0)
        except ArgumentError:
            continue
        for view in views:
            make_page(view)


# --- text -----------------------------------------------------------------------------------------------------------


def test_text_of_a_dump(path: Path) -> None:
    result = invoke("top", "--pool", path)
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert "pool kv: 99 pages, 84 free, 15 held" in text
    assert "held by request 12, caller 3" in text
    assert re.search(r"request +chat-7 +5 +3 ", text)
    assert SCRIPT in text
    assert r"a\x1b[31mb\n" in text
    assert all(line.isprintable() and "…" not in line for line in text.splitlines())


def test_text_of_metrics(serve: Callable[..., str]) -> None:
    result = invoke("top", "--once", "--url", serve(expose(make_manager()).encode()))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("engine 0\n")
    assert "held by request 12, caller 3" in result.stdout
    assert "chat-7" not in result.stdout  # metrics name no request


def test_it_goes_on_until_it_is_interrupted(serve: Callable[..., str]) -> None:
    """Piped, views follow one another; the second has rates."""
    manager = make_manager()
    texts = [expose(manager)]
    manager.page_pool.get_new_pages(5)
    texts.append(expose(manager))
    command = [sys.executable, "-m", "pagepool", "top", "--url", serve(*(text.encode() for text in texts)), "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if "handed out" in line).split() == ["pages", "handed", "out", "15"]
        assert re.search(r"handed out +20 +\d+\.\d/s", next(line for line in lines if "handed out" in line))
        process.send_signal(2)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "give either --url or --pool"),
        (["--url", "http://x", "--pool", "dump.json"], 2, "give either --url or --pool"),
        (["--url", "http://x", "--html", "a.html"], 2, "--html needs --pool"),
        (["--url", "file:///etc/passwd", "--once"], 2, "--url: got 'file:///etc/passwd', allowed: http://... or https://..."),
        (["--url", "x", "--once"], 2, "--url: got 'x'"),
        (["--url", "http://127.0.0.1:1/metrics"], 1, "Error: http://127.0.0.1:1/metrics: "),
        (["--url", "http://[::1", "--once"], 2, "--url: got 'http://[::1', allowed: "),
        (["--pool", "missing.json"], 2, "File 'missing.json' does not exist"),
        (["--pool", "dump.json", "--html", "dump.json"], 2, "--html dump.json is the same file as --pool dump.json"),
        (["--pool", "dump.json", "--html", "no/a.html"], 1, "no/a.html cannot be written"),
        (["--pool", "dump.json", "--interval", "0"], 2, "0.0 is not in the range x>0"),
    ],
)
def test_what_is_refused(args: list[str], code: int, message: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    refuse(code, message, "top", *args)


def test_a_server_of_something_else(serve: Callable[..., str]) -> None:
    for url, message in (
        (serve(b"<html>", status=404), "404 Not Found"),
        (serve(b"<html>"), "metrics: got"),
        (serve(b"\xff"), "got text that is not UTF-8, allowed: metrics"),
    ):
        refuse(1, f"Error: {url}: ", "top", "--url", url, "--once")
        refuse(1, message, "top", "--url", url, "--once")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"pagepool_dump": 1}')
    result = refuse(2, "a.json: dump: got no 'version', allowed: an object with it", "top", "--pool", tmp_path / "a.json")
    assert result.stdout == ""


def test_without_the_client() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from pagepool.replay.cli import main; main()"
    process = run_python("-c", code, "top", "--url", "http://127.0.0.1:1")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == "Error: metrics need prometheus-client: pip install 'pagepool[metrics]'\n"


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page(path: Path) -> None:
    html = path.with_suffix(".html")
    result = invoke("top", "--pool", path, "--html", html)
    assert result.exit_code == 0
    page = Page(html.read_text())
    assert page.open == page.fetched == []
    assert not {"script", "link", "img", "iframe"} & {*page.seen}
    assert page.texts["h1"] == ["dump.json: who holds the pages"]
    assert page.texts["li"] == ["held by request: 12", "held by caller: 3", "free: 84", "can be hit, held or free: 8"]
    assert "request chat-7" in page.texts["th"]
    assert f"request {SCRIPT}" in page.texts["th"]
    only = invoke("top", "--pool", path, "--html", "-")
    assert only.stdout == html.read_text()


def make_large() -> View:
    """Several pools, many holders with long names, and a host tier."""
    groups = [CacheGroupSpec(SPEC), CacheGroupSpec(MambaSpec(4, ((2,),), "bfloat16"), pool="states")]
    manager = CacheManager({"kv": 2000, "states": 900}, groups, 64, host_tier=HostTier({"kv": 4000, "states": 2000}))
    for i in range(250):
        request = EngineRequest(f"request-{i}-" + "W" * 60, [i] * 9)
        assert manager.allocate_slots(request, 9) is not None
    return view_dump(read_dump(json.dumps(manager.dump()).encode()), "a-name-of-a-file-that-is-rather-long-" * 3 + ".json")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
class TestInABrowser:
    def run(self, tmp_path: Path, *args: str) -> str:
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *args]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        return process.stdout

    def test_names_are_inert(self, path: Path, tmp_path: Path) -> None:
        """Not even without the page's policy against scripts."""
        html = path.with_suffix(".html")
        assert invoke("top", "--pool", path, "--html", html).exit_code == 0
        html.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html.read_text()))
        dom = self.run(tmp_path, "--dump-dom", html.as_uri())
        assert "<title>dump.json: who holds the pages</title>" in dom
        assert not re.search(r"<(script|img)", dom)
        assert "&lt;script&gt;" in dom

    def test_it_runs_no_script(self, tmp_path: Path) -> None:
        """If one ever came in, the policy of the page would stop it."""
        html = tmp_path / "page.html"
        html.write_text(make_page(make_large()).replace("</main>", "<script>document.title = 'pwned'</script></main>"))
        assert "<title>pwned" not in self.run(tmp_path, "--dump-dom", html.as_uri())

    @pytest.mark.parametrize("width", [400, 1300])
    def test_nothing_sticks_out(self, width: int, tmp_path: Path) -> None:
        html, picture = tmp_path / "page.html", tmp_path / "page.png"
        text = re.sub(r"<meta http-equiv[^>]*>", "", make_page(make_large()))
        script = "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join(' of ')</script>"
        html.write_text(text.replace("</main>", f"</main>{script}"))
        size = f"--window-size={width},1200"
        dom = self.run(tmp_path, size, "--dump-dom", html.as_uri())
        found = re.search(r"<title>(\d+) of (\d+)</title>", dom)
        assert found is not None
        assert int(found[1]) <= int(found[2])
        self.run(tmp_path, size, f"--screenshot={picture}", html.as_uri())
        assert picture.stat().st_size > 10_000
        if os.environ.get("PAGEPOOL_KEEP_PICTURES"):
            shutil.copy(picture, Path(os.environ["PAGEPOOL_KEEP_PICTURES"]) / f"top-{width}.png")
