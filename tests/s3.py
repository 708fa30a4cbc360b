"""Servers of object storage: moto's for S3 with a faulty proxy before it, and a small one for GCS.

>>> with Server() as server:
...     url = server.url("run")  # s3://…?endpoint=…
...     server.objects()
[]
"""

import atexit
import contextlib
import functools
import http.client
import json
import subprocess
import sys
import threading
import urllib.parse
import xml.etree.ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.forks import DIE_WITH_PARENT

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "a-secret"}
BUCKET = "checkpoints"
# The system chooses the port, so that servers of several test runs never have the same.
SERVER = (
    DIE_WITH_PARENT.format(signal=9)
    + """
from moto.moto_server import werkzeug_app as moto
from werkzeug.serving import make_server
app = moto.DomainDispatcherApplication(moto.create_backend_app)
app.debug = True
server = make_server(
    "127.0.0.1", 0, app, threaded=True, request_handler=moto.MotoRequestHandler
)
print(server.port, flush=True)
server.serve_forever()
"""
)


class Server:
    """moto's server, with one bucket."""

    def __enter__(self):
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=quiet, stdout=subprocess.PIPE, stderr=quiet
        )
        self.port = int(self.process.stdout.readline())
        self.request("PUT", "")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def url(self, path, port=None):
        """Return the URL of a series, through the proxy at a port if it is given."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return f"s3://{BUCKET}/{path}?endpoint={endpoint}&aws_region=us-east-1"

    def request(self, method, name, body=None, query=""):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            # moto takes any signature, but not none.
            headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3"}
            connection.request(
                method, f"/{BUCKET}/{urllib.parse.quote(name)}{query}", body, headers
            )
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 300, (method, name, answer.status, content)
            return content

    def objects(self, path=""):
        """List the names of all objects below a path."""
        answer = self.request("GET", "", query=f"?list-type=2&prefix={urllib.parse.quote(path)}")
        root = xml.etree.ElementTree.fromstring(answer)
        return [node.text for node in root.iter() if node.tag.endswith("}Key")]

    def read(self, name):
        return self.request("GET", name)

    def write(self, name, content):
        self.request("PUT", name, content)

    def delete(self, name):
        self.request("DELETE", name)


@functools.cache
def shared_server():
    """Start a server for all tests of this process."""
    server = Server().__enter__()
    atexit.register(server.__exit__)
    return server


class Proxy:
    """Pass requests on to a server, except for what `fault` does.

    `fault(number, method, name)` is called before each request, the first of which has number 0. It
    may sleep or kill, and returns None to pass the request on, a status to answer it, or a function
    to call when the server has answered. "drop" passes it on and loses the answer, and "stale"
    answers a list as it was before.
    """

    def __init__(self, server, fault=lambda number, method, name: None):
        self.server, self.fault = server, fault
        self.log, self._lists, self._lock = [], {}, threading.Lock()

    def __enter__(self):
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def handle_one_request(self):
                with contextlib.suppress(OSError):  # the client was killed
                    super().handle_one_request()
                    return
                self.close_connection = True

            def serve(self):
                proxy.serve(self)

            def log_message(self, *_):
                pass

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = serve

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def url(self, path):
        return self.server.url(path, self.port)

    def serve(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path, _, query = handler.path.partition("?")
        name = urllib.parse.unquote(path).removeprefix(f"/{BUCKET}/")
        if query:
            name = f"list {dict(urllib.parse.parse_qsl(query)).get('prefix', '')}"
        with self._lock:
            number = len(self.log)
            self.log.append((handler.command, name))
        action = self.fault(number, handler.command, name)
        status, headers, content = action, {}, b""
        if not isinstance(action, int):
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
            with contextlib.closing(connection):
                connection.request(handler.command, handler.path, body, dict(handler.headers))
                answer = connection.getresponse()
                status, headers, content = answer.status, answer.headers, answer.read()
        if callable(action):
            action()
        if action == "drop":
            handler.close_connection = True
            return
        if query and handler.command == "GET":
            if action == "stale":
                content = self._lists.get(query, content)
            else:
                self._lists[query] = content
        handler.send_response(status)
        length = headers.get("Content-Length", "0") if handler.command == "HEAD" else len(content)
        for key in ("ETag", "Last-Modified", "Content-Type", "Content-Range"):
            if key in headers:
                handler.send_header(key, headers[key])
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


def use_credentials(monkeypatch):
    """Give the credentials of the tests to this process and to those that it starts."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


class GoogleServer:
    """The part of Google's JSON interface that tensorstore uses, with the objects in a dict."""

    def __enter__(self):
        self.objects, self.requests, lock = {}, [], threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self, status, content=b"", **headers):
                self.send_response(status)
                for key, value in {**headers, "Content-Length": len(content)}.items():
                    self.send_header(key.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(content)

            def serve(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                name = query.get("name") or urllib.parse.unquote(url.path.partition("/o/")[2])
                with lock:
                    server.requests.append((self.command, name, query))
                    generation, content = server.objects.get(name, (0, b""))
                    wanted = query.get("ifGenerationMatch", generation)
                    if not name:
                        low, high = query.get("startOffset", ""), query.get("endOffset", "~")
                        items = [{"name": key} for key in server.objects if low <= key < high]
                        self.reply(200, json.dumps({"items": items}).encode())
                    elif int(wanted) != generation:
                        self.reply(412)
                    elif self.command == "POST":
                        server.objects[name] = (len(server.requests), body)
                        answer = {"name": name, "generation": str(len(server.requests))}
                        self.reply(200, json.dumps(answer).encode())
                    elif not generation:
                        self.reply(404)
                    elif self.command == "DELETE":
                        del server.objects[name]
                        self.reply(204)
                    else:
                        self.reply(200, content, x_goog_generation=generation)

            def log_message(self, *_):
                pass

            do_GET = do_POST = do_DELETE = serve

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
