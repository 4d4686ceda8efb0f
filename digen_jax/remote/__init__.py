"""What is in another process: its meshes, their commands and events, and the arrays that move between the two.

`leader` holds one stream to each mesh's process, which `following` is the other end of; `serving` executes there what
`sampling` asks for here. `link` moves arrays both ways: `outline` says how a tree looks, `frames` and `pull` move it,
`lending` gives it away. `fanout` names who gives published weights to which mesh, and `relay` takes them from there.
Nothing is unpickled.
"""

import os

# Before gRPC starts: its notes on closed connections are no mistakes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
