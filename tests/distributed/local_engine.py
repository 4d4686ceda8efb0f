"""An engine in this process: an actor is an object with threads, and what is sent is pickled as between processes."""

import itertools
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from digen_jax.distributed.engine import GROUPS, ProcessDied


class Stored:
    """A reference to a pickled value; within another value it is sent as a reference."""

    def __init__(self, value: Future):
        self.value = value
        STORED[id(self)] = self

    def __reduce__(self) -> tuple:
        return _stored, (id(self),)


STORED: WeakValueDictionary[int, Stored] = WeakValueDictionary()


def _stored(number: int) -> Stored:
    return STORED[number]


class LocalActor:
    def __init__(self, kind: type, arguments: tuple):
        self.object = kind(*arguments)
        self.threads = {name: ThreadPoolExecutor(count) for name, count in GROUPS.items()}
        self.calls: set[Future] = set()
        self.lost = False
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self.object)

    def call(self, method: str, arguments: Sequence[Any], group: str) -> Future:
        """A future of the pickled result."""
        found: Future = Future()
        with self.lock:
            if self.lost:
                found.set_exception(ProcessDied("killed"))
                return found
            self.calls.add(found)
        sent = [one if isinstance(one, Stored) else pickle.dumps(one) for one in arguments]
        self.threads[group].submit(self._execute, found, method, sent)
        return found

    def _execute(self, found: Future, method: str, sent: Sequence[Any]) -> None:
        with suppress(InvalidStateError):
            try:
                given = [
                    pickle.loads(one.value.result() if isinstance(one, Stored) else one)
                    for one in sent
                ]
                found.set_result(getattr(self.object, method)(*given))
            except BaseException as error:
                found.set_exception(pickle.loads(pickle.dumps(error)))

    def kill(self) -> None:
        with self.lock:
            self.lost = True
            calls, self.calls = self.calls, set()
        for call in calls:
            with suppress(InvalidStateError):
                call.set_exception(ProcessDied("killed"))


class LocalEngine:
    """`RayEngine` without a cluster. `actors` are all that were started, in their order."""

    def __init__(self):
        self.actors: list[LocalActor] = []
        self.numbers = itertools.count()

    def start(self, kind: type, arguments: Sequence[tuple], devices: Any = None) -> list:
        made = [LocalActor(kind, given) for given in arguments]
        self.actors += made
        return made

    def call(self, actor: LocalActor, method: str, *arguments: Any, group: str) -> Future:
        return _then(actor.call(method, arguments, group), lambda value: _sent(value))

    def call_pair(self, actor: LocalActor, method: str, *arguments: Any, group: str):
        both = actor.call(method, arguments, group)
        second = _then(both, lambda pair: pickle.dumps(pair[1]))
        return _then(both, lambda pair: _sent(pair[0])), Stored(second)

    def put(self, value: Any) -> Stored:
        found: Future = Future()
        found.set_result(pickle.dumps(value))
        return Stored(found)

    def get(self, ref: Stored) -> Any:
        return pickle.loads(ref.value.result())

    def kill(self, actor: LocalActor) -> None:
        actor.kill()

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _then(done: Future, change: Any) -> Future:
    found: Future = Future()

    def settle(one: Future) -> None:
        error = one.exception()
        with suppress(InvalidStateError):
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(change(one.result()))

    done.add_done_callback(settle)
    return found
