"""An OpenAI-compatible server in a thread, whose model is a function of prompt, seed and temperature.

It can be told to fail in the ways that real ones do, request by request.
"""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EOS = 2
MODEL = {"id": "tiny", "root": "/models/tiny", "owned_by": "stub", "created": 17}


LONGEST_S = 120.0  # that anything waits here


class StubServer(ThreadingHTTPServer):
    """`plan` names what is wrong with the next requests, "" for nothing; then all is well.

    None is answered before `together` of them have come; one that hangs does to the server's end.
    """

    daemon_threads = True

    def __init__(self, tokenizer, *, given="token_ids", plan=(), together=1, models=(MODEL,)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.given, self.together, self.models = tokenizer, given, together, models
        self.plan = list(plan)
        self.lock, self.ended = threading.Condition(), threading.Event()
        self.requests = []  # bodies, as they came
        self.running = self.most_running = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def asked(self):
        """How often each prompt was asked for."""
        return Counter(tuple(body["prompt"]) for body in self.requests)


@contextmanager
def serving(tokenizer, **settings):
    server = StubServer(tokenizer, **settings)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def written(prompt, *, temperature, seed, max_tokens):
    """(token ids without the end of text, whether it ended): bytes a to z of a tokenizer."""
    noise = 0 if temperature == 0 else seed
    number = (sum(prompt) * 7919 + noise) % 100_003
    length = 1 + number % 12
    letters = [65 + (number // (i + 1)) % 25 for i in range(length)]
    return letters[:max_tokens], length < max_tokens


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self._reply(200, {"data": list(self.server.models)})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            trouble = server.plan.pop(0) if server.plan else ""
            server.running += 1
            server.most_running = max(server.most_running, server.running)
            server.lock.notify_all()
            server.lock.wait_for(lambda: server.most_running >= server.together, LONGEST_S)
        try:
            self._respond(trouble, body)
        finally:
            with server.lock:
                server.running -= 1

    def _respond(self, trouble, body):
        if trouble == "drop":
            self.connection.close()
        elif trouble == "hang":
            self.server.ended.wait(LONGEST_S)
        elif trouble == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
        elif trouble == "html":
            self._reply(200, None)
        elif trouble:
            self._reply(int(trouble), {"error": {"message": "not now"}})
        else:
            self._reply(200, self._completion(body))

    def _completion(self, body):
        server = self.server
        ids, ended = written(
            body["prompt"],
            temperature=body["temperature"],
            seed=body["seed"],
            max_tokens=body["max_tokens"],
        )
        choice = {"finish_reason": "stop" if ended else "length"}
        choice["text"] = server.tokenizer.decode(ids)
        if server.given == "token_ids":
            choice["token_ids"] = [*ids, EOS] if ended else ids
        if server.given == "logprobs":
            choice["logprobs"] = {"content": [{"id": index} for index in ids]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids) + ended}
        return {"choices": [choice], "usage": usage}

    def _reply(self, status, content):
        data = b"<html>" if content is None else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has gone
