"""Time and connections: comments that keep a stream alive, headers that wait, clients that leave, keys at the door."""

from __future__ import annotations

import json

import httpx
import pytest
from tests.web.conftest import Serve
from tests.web.scripted import REPORT, WAIT_S, Hold, Running, ScriptedServer, Step, completed, raw_request, read_until
from tests.web.test_answers import MESSAGES, Connect, events
from tests.web.test_refusals import CHAT, error_of

from strata.errors import Busy, StrataError, WaitedTooLong
from strata.serve.request import Admitted, Parked, Reading, Started, Text, Waiting
from strata.web.answers import Limits
from strata.web.app import Doorway, create_app

ADMITTED, STARTED = Admitted(prompt_tokens=100), Started(slot=0, cache=REPORT)
PARKED = b": parked, waits for room\n\n"
QUICK = Limits(keep_alive_s=0.05, started_wait_s=0.05, progress_s=0.0)


def body(stream: bool) -> bytes:
    return json.dumps({"messages": MESSAGES, "stream": stream}).encode()


def test_comments_keep_a_silent_stream_alive(serve: Serve) -> None:
    hold = Hold()
    script: list[Step] = [ADMITTED, STARTED, hold, Text(text="late", n_tokens=1), completed()]
    connection = raw_request(serve(ScriptedServer(script), limits=QUICK).port, body(stream=True))
    received = read_until(connection, b": reading\n\n")
    received += read_until(connection, b": reading\n\n")  # from a timer, so there is another one
    hold.release()
    received += read_until(connection, b"[DONE]")
    assert b"late" in received


def test_a_stream_tells_how_far_reading_is(serve: Serve) -> None:
    hold = Hold()
    script: list[Step] = [ADMITTED, STARTED, Reading(held=2048, total=6100), hold, completed()]
    connection = raw_request(serve(ScriptedServer(script), limits=QUICK).port, body(stream=True))
    read_until(connection, b": reading 2048/6100\n\n")
    hold.release()
    read_until(connection, b"[DONE]")


def test_waiting_for_a_slot_delays_neither_headers_nor_comments(serve: Serve) -> None:
    hold = Hold()
    connection = raw_request(
        serve(ScriptedServer([ADMITTED, hold, STARTED, completed()]), limits=QUICK).port, body(stream=True)
    )
    received = read_until(connection, b": waiting\n\n")
    assert received.startswith(b"HTTP/1.1 200")
    assert b"x-strata-cache" not in received
    hold.release()
    read_until(connection, b"[DONE]")


def test_a_stream_tells_that_its_request_waits_for_room_to_begin(serve: Serve) -> None:
    hold = Hold()
    script: list[Step] = [ADMITTED, Parked(), hold, STARTED, Text(text="x", n_tokens=1), completed()]
    connection = raw_request(serve(ScriptedServer(script), limits=QUICK).port, body(stream=True))
    assert b"x-strata-cache" not in read_until(connection, PARKED)
    hold.release()
    assert b'"content":"x"' in read_until(connection, b"[DONE]")


def test_a_reply_that_has_to_wait_for_room_says_so_at_once(serve: Serve) -> None:
    hold = Hold()
    script: list[Step] = [ADMITTED, STARTED, Text(text="x", n_tokens=1), Parked(), hold, completed()]
    connection = raw_request(serve(ScriptedServer(script)).port, body(stream=True))  # its timers are too slow to help
    assert b'"content":"x"' in read_until(connection, PARKED)
    hold.release()
    read_until(connection, b"[DONE]")


def test_a_stream_tells_its_place_in_the_queue(serve: Serve) -> None:
    holds = Hold(), Hold()
    places = [Waiting(position=2, total=5), holds[0], Waiting(position=1, total=4), holds[1]]
    script: list[Step] = [ADMITTED, *places, STARTED, Text(text="x", n_tokens=1), completed()]
    connection = raw_request(serve(ScriptedServer(script), limits=QUICK).port, body(stream=True))
    received = read_until(connection, b": wait_slot 2/5\n\n")
    assert received.startswith(b"HTTP/1.1 200") and b"x-strata-cache" not in received
    read_until(connection, b": wait_slot 2/5\n\n")  # from a timer
    holds[0].release()
    read_until(connection, b": wait_slot 1/4\n\n")
    holds[1].release()
    assert b'"content":"x"' in read_until(connection, b"[DONE]")


def test_a_short_wait_does_not_cost_the_cache_header(serve: Serve) -> None:
    hold = Hold()
    script: list[Step] = [ADMITTED, Waiting(position=1, total=1), hold, STARTED, completed()]
    connection = raw_request(serve(ScriptedServer(script)).port, body(stream=True))
    hold.release()
    assert REPORT.header().encode() in read_until(connection, b"\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "status"), [(Busy, 429), (WaitedTooLong, 503)])
def test_a_queue_that_refuses(client: Connect, error: type[StrataError], status: int, stream: bool) -> None:
    script = [ADMITTED, Waiting(position=1, total=1), error("later", retry_after_s=5)]
    response = client(script).http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    assert error_of(response, status)["code"] == error.code
    assert response.headers["retry-after"] == "5"


def test_the_headers_wait_for_the_cache_report(serve: Serve) -> None:
    hold = Hold()
    limits = Limits(started_wait_s=WAIT_S)
    connection = raw_request(
        serve(ScriptedServer([ADMITTED, hold, STARTED, completed()]), limits=limits).port, body(stream=True)
    )
    hold.release()
    assert REPORT.header().encode() in read_until(connection, b"\r\n\r\n")


def test_comments_are_no_events_to_the_official_client(client: Connect) -> None:
    script = [ADMITTED, STARTED, *(Reading(held=n, total=9) for n in range(9)), Text(text="x", n_tokens=1), completed()]
    stream = client(script, limits=QUICK).openai.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "x"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_client_that_leaves_ends_its_turn(serve: Serve, stream: bool, before: int) -> None:
    hold = Hold()
    steps: list[Step] = [ADMITTED, STARTED, Text(text="x", n_tokens=1)]
    server = ScriptedServer([*steps[:before], hold, completed()])
    connection = raw_request(serve(server).port, body(stream))
    assert hold.reached.wait(WAIT_S)
    assert not server.ended.acquire(blocking=False)
    connection.close()
    assert server.ended.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_cancelled_once_and_then_left_to_put_things_in_order(stream: bool) -> None:
    hold, tidying = Hold(), Hold()
    server = ScriptedServer([ADMITTED, hold])
    server.at_the_end = tidying
    app = create_app(server)
    running = Running(app)
    try:
        connection = raw_request(running.port, body(stream))
        assert hold.reached.wait(WAIT_S)
        connection.close()
        tidying.call(app.state.exchanges.cut_off)
        tidying.release()
        assert server.ended.acquire(timeout=WAIT_S)
        assert server.tidy
    finally:
        running.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopping_server_tells_its_clients(stream: bool) -> None:
    hold = Hold()
    app = create_app(ScriptedServer([ADMITTED, STARTED, Text(text="x", n_tokens=1), hold]))
    running = Running(app)
    try:
        connection = raw_request(running.port, body(stream))
        hold.call(app.state.exchanges.cut_off)
        received = read_until(connection, b"the server is stopping")
        assert received.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    finally:
        running.stop()


def test_a_client_that_never_reads_does_not_keep_its_slot(serve: Serve) -> None:
    text = Text(text="x" * 100_000, n_tokens=1)
    server = ScriptedServer([ADMITTED, STARTED, *[text] * 200, completed()])
    connection = raw_request(serve(server).port, body(stream=True))
    assert server.ended.acquire(timeout=WAIT_S)
    connection.close()


def test_a_client_that_leaves_after_its_answer_does_not_stop_what_comes_behind(serve: Serve) -> None:
    parking, parked = Hold(), Hold()
    server = ScriptedServer([ADMITTED, STARTED, Text(text="x", n_tokens=1), completed(), parking, parked])
    connection = raw_request(serve(server).port, body(stream=True))
    read_until(connection, b"[DONE]")
    connection.close()
    parking.release()
    assert parked.reached.wait(WAIT_S)
    parked.release()
    assert server.ended.acquire(timeout=WAIT_S)


def test_the_answer_does_not_wait_for_what_comes_behind_it(serve: Serve) -> None:
    parking = Hold()
    server = ScriptedServer([ADMITTED, STARTED, Text(text="x", n_tokens=1), completed(), parking])
    running = serve(server)
    for stream in (True, False):
        response = httpx.post(running.url + CHAT, json={"messages": MESSAGES, "stream": stream}, timeout=WAIT_S)
        assert response.status_code == 200
    parking.release()


def test_one_connection_can_carry_many_requests(client: Connect) -> None:
    connected = client()
    for stream in (True, False, True):
        response = connected.http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
        assert response.status_code == 200
        assert not stream or events(response.text)[-1] == "[DONE]"
    assert all(connected.server.ended.acquire(timeout=1) for _ in range(3))


def test_the_doorway_says_what_it_waits_for() -> None:
    doorway = Doorway()
    running = Running(doorway)
    try:
        doorway.doing = "model 42%"
        for path in ("/health", "/v1/models", "/anything"):
            response = httpx.get(running.url + path)
            assert "model 42%" in error_of(response, 503)["message"]
            assert response.headers["retry-after"] == "2"
        doorway.open(create_app(ScriptedServer()))
        assert httpx.get(running.url + "/health").json() == {"status": "ok"}
    finally:
        running.stop()
