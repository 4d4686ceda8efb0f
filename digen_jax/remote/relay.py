"""A sampling mesh's link: published weights come from the giver that the leader has named, and are given on."""

import sys

from digen_jax.remote.following import Following
from digen_jax.remote.link import LinkError, RemoteLink
from digen_jax.runtime.link import CopyOf, Key, Link, Shardings, Tree
from digen_jax.scheduling.commands import Publication


class Relay:
    """A `Link`: another one, but for published weights. One thread takes these.

    Args:
      link: of the mesh.
      remote: of this process.
      following: the stream to the leader, which names givers.
      gives: whether others may take from here what has been received; all of it must lie on this process's devices.
    """

    def __init__(self, link: Link, remote: RemoteLink, following: Following, gives: bool):
        self._link, self._remote, self._following, self._gives = link, remote, following, gives
        self._giver = ""  # with which there is a connection

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`."""
        self._link.offer(key, tree)

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`; raises LinkError as `RemoteLink.take`. Where a giver fails, the trainer gives."""
        if not isinstance(key, Publication):
            return self._link.take(key, shardings, taker)
        tree = self._given(key, shardings, taker)
        if tree is None:
            tree = self._link.take(key, shardings, taker)
        if tree is not None and self._gives:
            self._link.offer(CopyOf(self._following.name, key), tree)
        return tree

    def _given(self, publication: Publication, shardings: Shardings, taker: str) -> Tree | None:
        """What the named giver gives; None: there is none, or it has failed."""
        giver = self._following.givers.pop(publication, None)
        if giver is None:
            return None
        if self._giver not in ("", giver.mesh):
            self._remote.part(self._giver)
        self._giver = giver.mesh
        self._remote.meet_giver(giver.mesh, giver.address, giver.seconds)
        try:
            tree = self._link.take(CopyOf(giver.mesh, publication), shardings, taker)
        except (LinkError, ValueError) as error:  # the latter: what it sends cannot be read
            self._following.missed(giver.mesh, failed=True)
            if not self._following.ends:
                version = f"version {publication.version}"
                print(
                    f"{self._following.name} takes {version} from the trainer, not from {giver.mesh}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            return None
        if tree is None:
            self._following.missed(giver.mesh, failed=False)
        return tree

    def drop(self, publication: Publication) -> None:
        """Published weights are given no longer; transfers in progress are completed."""
        self._following.givers.pop(publication, None)
        self._link.withdraw(CopyOf(self._following.name, publication))

    def withdraw(self, key: Key) -> None:
        """See `Link`."""
        self._link.withdraw(key)

    def settle(self, key: Key) -> bool:
        """See `Link`."""
        return self._link.settle(key)

    def give_up(self, worker: str) -> None:
        """See `Link`."""
        self._link.give_up(worker)
