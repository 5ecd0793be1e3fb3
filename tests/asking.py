"""What tests of HTTP share: a request and its answer, and bytes as they are sent."""

import http.client
import json
import socket
import time

from service import TIMEOUT

MODEL = "moe-32.bin"
PROMPT = "It was the custom of "


def ask(service, method, path, body=None, headers=()):
    """(status, headers, body) of a request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method, path, data, dict(headers))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, dict(response.getheaders()), text


def complete(service, **fields):
    status, _, text = ask(service, "POST", "/v1/completions", {"model": MODEL, **fields})
    return status, json.loads(text)


def message(text):
    return json.loads(text)["error"]["message"]


def raw(service, *pieces, pause=0.0):
    """What the server answers to bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received
