"""Control between a leader and meshes: who may join, commands and events, and what happens when a side is lost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time

import grpc
import pytest

from digen_jax.engine.divergence import DivergedError
from digen_jax.errors import ConfigError, FieldError
from digen_jax.process.ending import Stopped
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote import following
from digen_jax.remote.failures import NotDone
from digen_jax.remote.following import Following
from digen_jax.remote.identity import Identity, job_token
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.member import Gone, Keepalive
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import HELLO, MESSAGE, PACKAGE, Tls, Wire
from digen_jax.rewards import process
from digen_jax.rewards.mistakes import RewardFailed, RewardMistake
from digen_jax.rewards.pool import Hung, may_pass
from digen_jax.runtime.clock import measured
from digen_jax.scheduling.commands import Update
from digen_jax.scheduling.events import Completed
from tests.pipelines import ROOT
from tests.remote import mesh_process
from tests.remote.mesh_process import FAST, IDENTITY, TOKEN, encode
from tests.remote.rooms import Room, mesh, soon


def test_commands_go_in_order_and_answers_come_back(room):
    done = mesh_process.Pretends()
    with mesh(room, executes=done):
        member = room.joined()
        assert (member.name, member.devices) == ("rollout 0", 2)
        asked = [member.ask(encode(step)) for step in range(20)]
        found = [future.result(30) for future in asked]
        assert [event.command.step for event in found] == [*range(20)] == done.steps
        assert [event.command.serial for event in found] == [*range(1, 21)]
        with pytest.raises(NotDone, match=r"rollout 0: ValueError\('step 13 cannot be encoded'\)"):
            member.ask(encode(-13)).result(30)
        assert isinstance(member.ask(encode(3)).result(30), Completed)


FAILURES = [
    RewardFailed("reward 'mine' raised ValueError: x\n  rewards.py, line 3, in mine: raise"),
    RewardMistake("reward 'mine' returned 3 values\n  for 4 images"),
    process.Gone("reward 'mine' died in its process"),
    process.Gone("reward 'mine' died", "do: so"),
    process.Late("reward 'mine' took more than 3 seconds", "fix it, or raise config.x"),
    Hung("reward 'mine' hangs"),
    Stopped("the run cannot continue"),
    DivergedError("an image that the trained model drew holds NaN"),
    ConfigError("one\nsentence"),
    FieldError("config.x must be y"),
]


def test_what_the_run_must_know_fails_here_as_it_did_there(room):
    expected = [type(error) for error in FAILURES[:-1]] + [ConfigError]
    with mesh(room, executes=mesh_process.Pretends(errors=FAILURES)):
        member = room.joined()
        for error, kind in zip(FAILURES, expected, strict=True):
            found = member.ask(encode(-1)).exception(30)
            assert type(found) is kind and str(found) == str(error)
            assert may_pass(found) is may_pass(error)
            assert getattr(found, "advice", None) == getattr(error, "advice", None)
        assert type(member.ask(encode(-1)).exception(30)) is NotDone


def test_what_the_timeline_shows_apart_there_it_shows_here(room):
    with mesh(room):
        sampler = RemoteSampler(room.joined(), RemoteLink(Wire(IDENTITY), {}))
        with measured() as stopwatch:
            sampler.encode(mesh_process.PARTS)
            end = time.perf_counter()
    ((kind, start, finish),) = stopwatch.parts
    assert kind == "score" and 0.1 <= finish - start < end - start < end - stopwatch.began
    assert finish < end - 0.05 and start > stopwatch.began + 0.04


def test_a_mesh_that_joins_in_mid_run_knows_the_present_step(room):
    room.step, done = 7, mesh_process.Pretends()
    stream = Following(Wire(IDENTITY), room.address, pb.Hello(mesh="rollout 0"), 20)
    assert stream.welcome.step == 7
    room.step = 9  # while it reads its model
    thread = threading.Thread(target=serve, args=(stream, done))
    thread.start()
    room.joined().ask(encode(9)).result(30)
    assert [(type(one), one.step) for one in done.dropped] == [(Update, 8)] and done.steps == [9]
    room.leader.close(seconds=0.1)
    thread.join(30)
    stream.close("")


def test_a_run_that_ends_is_told_to_its_meshes():
    found = Room()
    with mesh(found) as (_, raised):
        member = found.joined()
        found.close()
        assert not found.leader.meshes and not raised and found.said.empty()
        with pytest.raises(Gone):
            member.ask(encode(1))


def test_a_mesh_that_was_asked_to_end_is_dismissed_and_not_lost(room):
    free, done = threading.Event(), mesh_process.Pretends()
    done._free = free
    with mesh(room), contextlib.ExitStack() as stack:
        room.joined()
        stream, raised = stack.enter_context(mesh(room, "rollout 1", done))
        member = room.joined("rollout 1")
        assert member.asked == 0
        stream.asked(signal.SIGTERM)
        soon(lambda: member.asked)
        assert member.asked == signal.SIGTERM
        present = member.ask(encode(mesh_process.WAITS))
        soon(lambda: done.steps)
        room.leader.dismiss("rollout 1", "SIGTERM")
        with pytest.raises(Gone, match="rollout 1 was dismissed: SIGTERM"):
            member.ask(encode(2))
        free.set()
        assert present.result(30).command.step == mesh_process.WAITS
        soon(lambda: list(room.leader.meshes) == ["rollout 0"])
        assert not raised
        room.leader.dismiss("rollout 1", "again")
    assert room.lost() == ("rollout 0", "has left: the test has ended") and room.said.empty()


def test_a_given_up_mesh_keeps_nobody_waiting(room):
    free = threading.Event()
    with mesh(room, executes=mesh_process.Pretends(free)) as (_, raised):
        member = room.joined()
        slow = member.ask(encode(mesh_process.WAITS))
        room.leader.meshes["rollout 0"].give_up("was given up")
        with pytest.raises(Gone, match="rollout 0 was given up"):
            slow.result(1)
        with pytest.raises(Gone):
            member.ask(encode(1))
        free.set()
        soon(lambda: raised)
        (error,) = raised
        assert isinstance(error, Stopped) and "counts rollout 0 as lost: it was given up" in str(
            error
        )
    assert room.said.empty()


def test_a_mesh_that_leaves_may_come_again_but_not_twice(room, monkeypatch, capsys):
    monkeypatch.setattr(following, "SILENCES", 0.4)
    with mesh(room):
        room.joined()
        with pytest.raises(
            ConfigError, match="rollout 0 has joined already: give each process a mesh"
        ):
            Following(Wire(IDENTITY), room.address, pb.Hello(mesh="rollout 0"), 20)
    assert capsys.readouterr().out.count("still holds another process to be rollout 0") == 1
    assert room.lost() == ("rollout 0", "has left: the test has ended")
    with mesh(room):
        room.joined()


def test_a_restarted_mesh_waits_until_its_predecessor_is_lost(room):
    """Which has been silent for a while, and its connection stands."""
    _, end = silent(room, "rollout 0")
    room.joined()
    begin = time.monotonic()
    with mesh(room):
        name, why = room.lost()
        assert name == "rollout 0" and why.endswith("and another process comes in its place")
        room.joined().ask(encode(1)).result(30)
        assert FAST.silence / 2 < time.monotonic() - begin
    end()


def test_a_mesh_that_cannot_be_taken_up_is_lost(room, capfd):
    def joined(mesh):
        raise OSError("no space left for what is printed")

    room.leader._joined = joined
    with mesh(room) as (_, raised):
        assert room.lost() == (
            "rollout 0",
            "cannot be used (OSError('no space left for what is printed'))",
        )
        soon(lambda: raised)
        assert isinstance(raised[0], Stopped)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("other", "hello", "sentence"),
    [
        (Identity("x" * 20, "c", "v"), {}, "its job token differs from this job's"),
        (Identity("", "c", "v"), {}, "its job token differs from this job's"),
        (Identity(TOKEN, "d", "v"), {}, "its config is 'd' and the leader's 'c'"),
        (Identity(TOKEN, "c", "w"), {}, "its code is 'w' and the leader's 'v'"),
        (IDENTITY, {"process": 1}, "its mesh has no process 1"),
        (IDENTITY, {"mesh": ""}, "its hello has no mesh's name"),
        (IDENTITY, {"mesh": "x" * 200}, "its hello has no mesh's name"),
        (IDENTITY, {"mesh": "trainer"}, "it is none of the trainer's 0 other processes"),
    ],
)
def test_a_process_of_another_job_is_refused_by_name(room, other, hello, sentence):
    with mesh(room):
        member = room.joined()
        fields = {"mesh": "rollout 1", **hello}
        with pytest.raises(ConfigError) as error:
            Following(Wire(other), room.address, pb.Hello(**fields), 20)
        assert sentence in str(error.value) and room.address in str(error.value)
        assert isinstance(member.ask(encode(1)).result(30), Completed)
        assert list(room.leader.meshes) == ["rollout 0"] and room.said.empty()


STRANGE = {
    "garbage": os.urandom(5000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(10_000),
    "half a preface": b"PRI * HTTP/2.0\r\n\r\nSM",
    "a frame too long": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000,
    "nothing": b"",
}


def test_strangers_on_the_port_change_nothing(room):
    host, port = room.address.split(":")
    with mesh(room), contextlib.ExitStack() as stack:
        member = room.joined()
        for given in STRANGE.values():
            stranger = socket.create_connection((host, int(port)), 10)
            stack.enter_context(stranger)  # and stays connected
            with contextlib.suppress(OSError):
                stranger.sendall(given)
            assert isinstance(member.ask(encode(1)).result(30), Completed)
        for method in ("Control/Follow", "Lending/Open", "Other/Thing"):
            channel = stack.enter_context(grpc.insecure_channel(room.address))
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/{PACKAGE}.{method}")(b"\xff" * 100, timeout=20)
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(member.ask(encode(1)).result(30), Completed)
    assert room.lost()[0] == "rollout 0"


@pytest.mark.parametrize(
    "reports",
    [
        [b"\xff" * 100],
        [pb.Report(event="{").SerializeToString()],
        [pb.Report(event=json.dumps(["x"] * 3)).SerializeToString()],
        [bytes(MESSAGE + 1)],
    ],
    ids=["no message", "no event", "another value", "too long"],
)
def test_a_mesh_that_sends_nonsense_is_lost_and_the_others_work(room, reports):
    """It has the token: a process with a fault."""
    with mesh(room):
        member = room.joined()
        channel = Wire(IDENTITY).channel(room.address)
        hello = pb.Hello(mesh="broken", config="c", code="v").SerializeToString()
        call = channel.stream_stream(f"/{PACKAGE}.Control/Follow")
        metadata = (*Wire(IDENTITY).metadata, (HELLO, hello))
        ready = pb.Report(ready=pb.Nothing()).SerializeToString()
        answers = call(iter([ready, *reports]), metadata=metadata, timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(answers)
        channel.close()
        soon(lambda: list(room.leader.meshes) == ["rollout 0"])
        # Where its first message could be read, it had joined.
        assert {room.lost()[0] for _ in range(room.said.qsize())} <= {"joined", "broken"}
        assert isinstance(member.ask(encode(1)).result(30), Completed)


def silent(room, name: str):
    """A process that says that it is ready and nothing else: (its call, what ends it)."""
    channel = Wire(IDENTITY).channel(room.address)
    hello = pb.Hello(mesh=name, config="c", code="v").SerializeToString()
    never = threading.Event()

    def says():
        yield pb.Report(ready=pb.Nothing()).SerializeToString()
        never.wait(60)

    follow = channel.stream_stream(f"/{PACKAGE}.Control/Follow")
    call = follow(says(), metadata=(*Wire(IDENTITY).metadata, (HELLO, hello)))

    def end():
        never.set()
        call.cancel()
        channel.close()

    return call, end


def test_a_silent_mesh_is_lost_in_time(room):
    begin = time.monotonic()
    _, end = silent(room, "silent")
    room.joined("silent")
    assert room.lost() == ("silent", f"has been silent for {FAST.silence:g} seconds")
    assert FAST.silence <= time.monotonic() - begin < 50
    end()


def test_a_mesh_that_reads_its_model_is_neither_lost_nor_joined(room):
    stream = Following(Wire(IDENTITY), room.address, pb.Hello(mesh="rollout 0"), 20)
    time.sleep(FAST.silence + 0.5)
    assert "rollout 0" in room.leader.meshes and room.said.empty()
    assert room.leader.wait_for({"rollout 0"}, 0.1) == {"rollout 0"}
    commands = stream.commands()
    threading.Thread(target=list, args=(commands,), daemon=True).start()
    room.joined()
    assert room.leader.wait_for({"rollout 0"}, 0.1) == set()
    stream.close("the test has ended")
    assert room.lost() == ("rollout 0", "has left: the test has ended")


def test_a_leader_that_is_not_there_or_silent_ends_the_mesh():
    with pytest.raises(ConfigError, match=r"the leader at localhost:1 was not reached in 0\.5 s"):
        Following(Wire(IDENTITY), "localhost:1", pb.Hello(mesh="x"), 0.5)
    # A leader that pings never.
    still = Room(Keepalive(ping=60, silence=0.8))
    with mesh(still) as (_, raised):
        still.joined()
        soon(lambda: raised)
        # Without pings the leader hears nothing, either: one of the two is first.
        assert isinstance(raised[0], Stopped) and "silent for 0.8 seconds" in str(raised[0])
    still.close()


def test_the_jobs_token_is_a_secret(monkeypatch):
    for wrong in ("", "short", "with a blank in it", "ä" * 20):
        monkeypatch.setenv("DIGEN_JAX_TOKEN", wrong)
        with pytest.raises(ConfigError, match="DIGEN_JAX_TOKEN must be a secret"):
            job_token()
    monkeypatch.setenv("DIGEN_JAX_TOKEN", TOKEN)
    assert job_token() == TOKEN
    mine, other = (Identity.of(config, TOKEN) for config in ({"a": 1, "b": 2}, {"a": 1, "b": 3}))
    assert mine == Identity.of({"b": 2, "a": 1}, TOKEN) != other
    assert mine.difference(mine.config, mine.code) is None and mine.knows(TOKEN)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> list[Tls]:
    """Of this job, and of a stranger whom the same authority has not signed."""
    folder = tmp_path_factory.mktemp("tls")
    config = "subjectAltName=DNS:localhost,IP:127.0.0.1"

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], cwd=folder, check=True, capture_output=True)

    found = []
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 2)
    for name in ("ours", "theirs"):
        ca, own = f"{name}-ca", name
        openssl(
            "req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}"
        )
        openssl("req", *key[:-2], "-keyout", f"{own}.key", "-out", f"{own}.csr", "-subj", "/CN=x")
        (folder / "ext").write_text(config)
        signed = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", "ext")
        openssl("x509", "-req", "-in", f"{own}.csr", *signed, "-out", f"{own}.pem", "-days", 2)
        found.append(Tls(*(folder / file for file in (f"{own}.pem", f"{own}.key", f"{ca}.pem"))))
    return found


def test_with_tls_only_signed_processes_join(certificates):
    ours, theirs = certificates
    found = Room(tls=ours)
    with mesh(found, tls=ours):
        member = found.joined()
        for tls in (None, theirs):
            with pytest.raises(
                ConfigError, match=r"was not reached in 1 s.*both or neither use TLS"
            ):
                Following(Wire(IDENTITY, tls), found.address, pb.Hello(mesh="x"), 1)
        assert isinstance(member.ask(encode(1)).result(30), Completed)
    found.close()
    with pytest.raises(ConfigError, match="a file for TLS cannot be read"):
        Tls(ROOT / "none", ROOT / "none", ROOT / "none").read()


def test_a_port_that_is_taken_is_a_sentence(room):
    with pytest.raises(ConfigError, match=f"cannot listen at {room.address}"):
        Wire(IDENTITY).server(room.address, [])
