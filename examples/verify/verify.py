#!/usr/bin/env python3
"""Receives webhooks that Postbox (or any sender of Standard Webhooks) signed. Standard library only.

    WEBHOOK_SECRETS="whsec_… whsec_…" python3 verify.py 3000

Copy `verify` into your program; the rest is a small server to try it with. Several secrets while one rotates.
Ed25519 signatures (`v1a`) need a library; `verify.mjs` shows how they are made up.
"""
import base64
import hashlib
import hmac
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

TOLERANCE_S = 300
BODY_BYTES_MAX = 16 * 1024 * 1024


class Refused(Exception):
    """Not genuine, or too old. Answer 401 and say no more."""


def verify(secrets, headers, body, now=None):
    """Returns the message's id if one of `secrets` signed exactly these bytes.

    `headers` are those of `http.server`; frameworks call `get_all` otherwise (`getlist`). What is there twice says two things.
    `body` is the bytes as they came: parse them afterwards, never before.
    """

    def only(name):
        values = headers.get_all(name) or [""]
        return values[0] if len(values) == 1 else ""

    message_id, timestamp = only("webhook-id"), only("webhook-timestamp")
    if not (timestamp.isascii() and timestamp.isdigit()) or len(timestamp) > 12 or "." in message_id or not message_id:
        raise Refused
    signed = f"{message_id}.{timestamp}.".encode() + body
    # "v1,<base64> v1,<base64>": one for each of the sender's keys.
    given = [entry[3:] for entry in only("webhook-signature").split(" ") if entry.startswith("v1,")]
    for secret in secrets:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        ours = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        if any(hmac.compare_digest(ours.encode(), theirs.encode()) for theirs in given):
            if abs((time.time() if now is None else now) - int(timestamp)) > TOLERANCE_S:
                raise Refused
            return message_id
    raise Refused


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        lengths = self.headers.get_all("content-length") or ["0"]
        length = int(lengths[0]) if len(lengths) == 1 and lengths[0].isascii() and lengths[0].isdigit() else -1
        # A negative length would read for ever, a huge one into memory.
        if not 0 <= length <= BODY_BYTES_MAX:
            self.send_response(400 if length < 0 else 413)
            self.end_headers()
            return
        body = self.rfile.read(length)
        try:
            message_id = verify(SECRETS, self.headers, body)
        except Refused:
            self.send_response(401)
        else:
            # Here: in one transaction, insert message_id into a unique column and do the work. If it was there, answer 409.
            print("genuine", message_id, self.headers.get("ce-type"), len(body), "bytes", flush=True)
            self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    SECRETS = os.environ["WEBHOOK_SECRETS"].split()
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()
