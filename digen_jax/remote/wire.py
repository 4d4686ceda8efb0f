"""gRPC between the processes of a run: servers, channels, limits, and the token of every call."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from digen_jax.errors import ConfigError
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.identity import Identity
from digen_jax.remote.server import Server

PACKAGE = "digen_jax.remote"
FRAME = 4 * 2**20  # bytes of arrays in a message
MESSAGE = FRAME + 2**16  # the largest message
TOKEN, HELLO, SILENCE = "digen-token", "digen-hello-bin", "digen-silence"
GRACE = 1.0  # seconds for calls at a server's end

OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE),
    ("grpc.max_send_message_length", MESSAGE),
    ("grpc.max_metadata_size", 8192),
    ("grpc.so_reuseport", 0),  # a second server on a port is an error
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel ends its connection
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a connection without a word is closed
]


@dataclasses.dataclass(frozen=True)
class Tls:
    """Files in PEM: every process shows the certificate, and trusts those that `authority` has signed."""

    certificate: pathlib.Path
    key: pathlib.Path
    authority: pathlib.Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority)."""
        try:
            return tuple(path.read_bytes() for path in (self.certificate, self.key, self.authority))
        except OSError as error:
            raise ConfigError(f"a file for TLS cannot be read: {error}") from error


@dataclasses.dataclass(frozen=True)
class Wire:
    """How this process's connections are made: with its identity, and encrypted where files are given."""

    identity: Identity
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return ((TOKEN, self.identity.token),)

    def server(
        self, address: str, services: Sequence[grpc.GenericRpcHandler]
    ) -> tuple[Server, int]:
        """(a server that has started, its port); the port 0 chooses a free one.

        Raises:
          ConfigError: it cannot listen there.
        """

        def open_port(server: grpc.aio.Server) -> int:
            if self.tls is None:
                return server.add_insecure_port(address)
            certificate, key, authority = self.tls.read()
            pair = [(key, certificate)]
            secure = grpc.ssl_server_credentials(pair, authority, require_client_auth=True)
            return server.add_secure_port(address, secure)

        try:
            server = Server(services, self._stranger, OPTIONS, open_port)
        except RuntimeError as error:
            raise ConfigError(
                f"this process cannot listen at {address}: give an address of this host and a free port"
            ) from error
        return server, server.port

    def _stranger(self, metadata: Sequence[tuple[str, Any]]) -> str | None:
        """Why a call is refused; None: it has the job's token."""
        if self.identity.knows(dict(metadata).get(TOKEN, "")):
            return None
        return "its job token differs from this job's: start all processes of a job with the same DIGEN_JAX_TOKEN"

    def channel(self, address: str) -> grpc.Channel:
        """To another process's server; it connects at its first call."""
        if self.tls is None:
            return grpc.insecure_channel(address, OPTIONS)
        certificate, key, authority = self.tls.read()
        secure = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, secure, OPTIONS)


class PeerError(RuntimeError):
    """A call to another process has failed; its text is what that process or gRPC says."""


class Peer:
    """Another process's services as functions, every call with a time limit."""

    def __init__(self, wire: Wire, address: str):
        self.address = address
        self._wire, self._channel = wire, wire.channel(address)
        self._told: set[grpc.Future] = set()  # gRPC cancels calls that nobody refers to

    def begin(self, method: str, request: Any, answer: Any, seconds: float) -> grpc.Future:
        """Begins a call of the service Lending; `answer` is its type, None: bytes.

        Raises:
          PeerError: the connection was closed.
        """
        call = self._channel.unary_unary(
            f"/{PACKAGE}.Lending/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=None if answer is None else answer.FromString,
        )
        try:
            return call.future(request, timeout=seconds, metadata=self._wire.metadata)
        except ValueError as error:  # gRPC's where the channel is closed
            raise PeerError(str(error)) from error

    def call(self, method: str, request: Any, answer: Any, seconds: float) -> Any:
        """The answer of a call of the service Lending; raises PeerError if it fails."""
        return result(self.begin(method, request, answer, seconds))

    def tell(self, method: str, request: Any, seconds: float) -> None:
        """Begins a call whose end does not matter: a closed connection or a lost process has no use for it."""
        with suppress(PeerError):
            call = self.begin(method, request, pb.Nothing, seconds)
            self._told.add(call)
            call.add_done_callback(self._told.discard)

    def close(self) -> None:
        """Ends the connection; the calls in progress are cancelled."""
        self._channel.close()


def result(call: grpc.Future) -> Any:
    """The answer of a call that `Peer.begin` has begun; raises PeerError if it fails."""
    try:
        return call.result()
    except grpc.RpcError as error:
        raise PeerError(error.details()) from error
    except grpc.FutureCancelledError as error:
        raise PeerError("the connection was closed") from error


def service(name: str, methods: Mapping[str, grpc.RpcMethodHandler]) -> grpc.GenericRpcHandler:
    """One of the services of control.proto."""
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.{name}", methods)


def unary(call: Callable[[Any, Any], Any], request: Any, raw: bool = False) -> Any:
    """A method that answers a message of the type `request` with a message, or with bytes."""
    return grpc.unary_unary_rpc_method_handler(
        call,
        request_deserializer=request.FromString,
        response_serializer=None if raw else _text,
    )


def _text(message: Any) -> bytes:
    return message.SerializeToString()


def hello_of(context: grpc.aio.ServicerContext) -> pb.Hello | None:
    """The hello of a call, None: it has none that can be read."""
    given = dict(context.invocation_metadata()).get(HELLO)
    try:
        return None if given is None else pb.Hello.FromString(given)
    except Exception:  # protobuf's errors are of several types, by its implementation
        return None
